"""verl's agent loops of both releases, written as its documentation shows, through the stand-ins."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise import configure, evaluate
from turnwise.errors import PluginError, TurnwiseError
from turnwise.types import Origin, Trajectory

OLD = """
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer


@register("mine")
class Mine(AgentLoopBase):
    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.response_length = config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params, **kwargs):
        messages, metrics = list(kwargs["raw_prompt"]), {}
        request_id = uuid4().hex
        prompt_ids = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True))
        response_ids, mask, logprobs = [], [], []
        for turn in range(2):
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=prompt_ids + response_ids, sampling_params=sampling_params,
                    image_data=None)
            response_ids += output.token_ids
            mask += [1] * len(output.token_ids)
            logprobs += output.log_probs
            seen = self.tokenizer.encode(f"seen {turn}", add_special_tokens=False)
            response_ids += seen
            mask += [0] * len(seen)
            logprobs += [0.0] * len(seen)
        SABOTAGE
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=response_ids[: self.response_length],
            response_mask=mask[: self.response_length], response_logprobs=logprobs, reward_score=0.5,
            num_turns=3, metrics=metrics, extra_fields={"truth": kwargs["reward_model"]["ground_truth"]})
"""
NEW = """
import asyncio
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import register


class Many(AgentLoopBase):
    def __init__(self, *args, times=2, **kwargs):
        super().__init__(*args, **kwargs)
        self.times = times
        self.response_length = self.rollout_config.response_length

    async def run(self, sampling_params, priority=0, **kwargs):
        messages = list(kwargs["raw_prompt"])

        async def one(number):
            said = [*messages[:-1], {"role": "user", "content": messages[-1]["content"] + f" ({number})"}]
            ids = await self.ct_build_initial_tokens(said)
            out = await self.server_manager.generate(
                request_id=str(number), prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 40},
                video_data=None, priority=priority)
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, out.token_ids, [], [], assistant_logprobs=out.log_probs)
            first = [*said, {"role": "assistant", "content": self.tokenizer.decode(out.token_ids)}]
            merged, mask, logprobs = await self.ct_merge_context_msg(
                first, [*first, {"role": "user", "content": "Again."}], merged.token_ids, mask, logprobs)
            out = await self.server_manager.generate(
                request_id=str(number), prompt_ids=merged.token_ids, sampling_params=sampling_params)
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                merged.token_ids, out.token_ids, mask, logprobs, assistant_logprobs=out.log_probs)
            return AgentLoopOutput(prompt_ids=ids, response_ids=merged.token_ids[len(ids):], response_mask=mask,
                                   response_logprobs=logprobs, num_turns=4, metrics={})

        return list(await asyncio.gather(*(one(number) for number in range(self.times))))
"""


@pytest.fixture
def played(tmp_path: Path) -> Any:
    """(the loop's code, its class) -> the trajectory of one episode."""
    rows = tmp_path / "rows.jsonl"
    prompt = [{"role": "user", "content": "What is 6 times 7?"}]
    rows.write_text(json.dumps({"data_source": "x", "prompt": prompt, "reward_model": {"ground_truth": "42"}}))

    def play(code: str, name: str, *overrides: str) -> Trajectory:
        file = tmp_path / f"loop_{abs(hash(code))}.py"
        file.write_text(code)
        settings = [
            "task=null", "engine=scripted", "engine.script=['It is 41.', 'It is 42.']", f"data.eval_files={rows}",
            f"runs_dir={tmp_path}/runs", "scoring.scorers={default: exact_match}", f"rollout.agent={file}:{name}",
        ]  # fmt: skip
        report = evaluate(configure(*settings, *overrides), console=Console(quiet=True))
        return report.trajectories[0]

    return play


def test_a_loop_of_061_is_recorded_token_by_token(played: Any) -> None:
    trajectory = played(OLD.replace("SABOTAGE", ""), "Mine")
    assert trajectory.failure is None
    assert [turn.message.text for turn in trajectory.turns] == ["It is 41.", "It is 42."]
    (ledger,) = trajectory.segments
    assert set(ledger.origins.tolist()) == {Origin.PROMPT, Origin.POLICY, Origin.TOOL}
    assert trajectory.artifacts["verl"] == {"reward_score": 0.5, "extra_fields": {"truth": "42"}, "num_turns": 3}


def test_a_loop_of_091_may_return_several_sequences(played: Any) -> None:
    trajectory = played(NEW, "Many")
    assert trajectory.failure is None
    assert [branch.name for branch in trajectory.branches] == ["sequence"]
    assert len(trajectory.segments) == 2 and len(trajectory.turns) == 2 == len(trajectory.branches[0].turns)
    assert [ledger.loss_mask.sum() > 0 for ledger in trajectory.segments] == [True, True]


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        ("mask[0] = 0", r"the mask says 0 of token \d+, which was recorded as the policy's"),
        ("mask[len(mask) - 1] = 1", r"the mask says 1 of token \d+, which was recorded as not the policy's"),
        ("response_ids[1] = 5", r"token \d+ is 5, and \d+ was recorded"),
        ("mask.pop()", "response ids and"),
        ("sampling_params['temperature'] = 0.3; await self.server_manager.generate('r', prompt_ids=prompt_ids, "
         "sampling_params=sampling_params)", "asks for temperature=0.3; the run draws with"),
        ("await self.server_manager.generate('r', prompt_ids=[5, 6], sampling_params={})", "does not return it among"),
        ("return None", "returned nothing"),
    ],
)  # fmt: skip
def test_a_loop_that_returns_something_else_is_refused_before_the_run(played: Any, sabotage: str, said: str) -> None:
    with pytest.raises(TurnwiseError, match=said):
        played(OLD.replace("SABOTAGE", sabotage), "Mine")


def test_the_yaml_of_agent_loops_names_classes_with_their_options(played: Any, tmp_path: Path) -> None:
    (tmp_path / "verl_many.py").write_text(NEW)
    (tmp_path / "agents.yaml").write_text("- name: many\n  _target_: verl_many.Many\n  times: 3\n")
    trajectory = played("x = 1\n", "x", f"rollout.agents_file={tmp_path}/agents.yaml", "rollout.agent=many")
    assert trajectory.failure is None and len(trajectory.branches) == 2


def test_a_budget_ends_the_episode_of_a_verl_loop(played: Any) -> None:
    trajectory = played(OLD.replace("SABOTAGE", ""), "Mine", "rollout.max_assistant_turns=1")
    assert trajectory.failure is None and trajectory.stop_reason == "assistant_turn_budget"
    assert len(trajectory.turns) == 1


def test_a_class_that_is_no_loop_is_refused(played: Any) -> None:
    with pytest.raises(PluginError, match="has no `run`"):
        played("from verl.experimental.agent_loop import AgentLoopBase\nclass Mine(AgentLoopBase): pass\n", "Mine")

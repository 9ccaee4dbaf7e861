"""verl's agent loops of both releases, written as its documentation shows, through the stand-ins."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_recipe import make_tokenizer
from transformers import AutoTokenizer

from turnwise import configure, evaluate
from turnwise.chat.calls.tool_format import load_format
from turnwise.errors import PluginError, TurnwiseError
from turnwise.system.plugins import load
from turnwise.types import Origin, ToolCall, Trajectory

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
    trajectory = played("x = 1\n", "x", f"verl.agents_file={tmp_path}/agents.yaml", "rollout.agent=many")
    assert trajectory.failure is None and len(trajectory.branches) == 2


def test_a_budget_ends_the_episode_of_a_verl_loop(played: Any) -> None:
    trajectory = played(OLD.replace("SABOTAGE", ""), "Mine", "rollout.max_assistant_turns=1")
    assert trajectory.failure is None and trajectory.stop_reason == "assistant_turn_budget"
    assert len(trajectory.turns) == 1


def test_a_class_that_is_no_loop_is_refused(played: Any) -> None:
    with pytest.raises(PluginError, match="has no `run`"):
        played("from verl.experimental.agent_loop import AgentLoopBase\nclass Mine(AgentLoopBase): pass\n", "Mine")


DERIVED = """
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Counting(BaseTool):
    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        agent_data.extra_fields["asked"] = agent_data.extra_fields.get("asked", 0) + parameters["n"]
        return ToolResponse(text=f"counted {len(agent_data.messages)}"), 0.25, {"kind": "count"}


@register("derived")
class Derived(ToolAgentLoop):
    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        response, reward, metrics = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        response.text += "!"
        return response, reward, metrics

    async def _handle_processing_tools_state(self, agent_data):
        state = await super()._handle_processing_tools_state(agent_data)
        assert state is AgentState.GENERATING
        return state

    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.reward_score = 0.5
        return output


@register("brief")
class Brief(SingleTurnAgentLoop):
    pass
"""
COUNTING = """
tools:
  - class_name: FOLDER/derived_loops.py:Counting
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: count
        description: Count.
        parameters: {type: object, properties: {n: {type: integer}}, required: [n]}
"""
CALL = '<tool_call>{"name": "count", "arguments": {"n": %d}}</tool_call>'


@pytest.fixture
def derived(tmp_path: Path, played: Any) -> Any:
    """(a row's agent_name, the script, overrides) -> the trajectory of one episode."""
    (tmp_path / "derived_loops.py").write_text(DERIVED)
    (tmp_path / "counting.yaml").write_text(COUNTING.replace("FOLDER", str(tmp_path)))

    def play(agent: str | None, script: list[str], *overrides: str) -> Trajectory:
        row = {
            "data_source": "x",
            "prompt": [{"role": "user", "content": "6*7?"}],
            "reward_model": {"ground_truth": "42"},
        }
        (tmp_path / "rows.jsonl").write_text(json.dumps(row | ({} if agent is None else {"agent_name": agent})))
        settings = (f"engine.script={json.dumps(script)}", f"rollout.agent={tmp_path}/derived_loops.py:Derived")
        found: Trajectory = played("x = 1\n", "x", *settings, *overrides)
        assert found.failure is None
        return found

    return play


def test_a_loop_derived_from_verls_tool_agent_loop_runs_our_tools(derived: Any, tmp_path: Path) -> None:
    tools = f"rollout.tools=[{tmp_path}/counting.yaml]"
    found = derived("derived", [CALL % 2 + CALL % 3, "<tool_call>{</tool_call>", "It is 42."], tools)
    assert [call.status for call in found.calls] == ["ok", "ok", "malformed"]
    assert [call.score for call in found.calls] == [0.25, 0.25, None]
    assert "counted 2!" in found.messages[2].text and "not valid JSON" in found.messages[4].text
    kept = found.artifacts["verl"]
    assert kept["reward_score"] == 0.5 and kept["num_turns"] == 6
    assert kept["extra_fields"] == {"asked": 5, "turn_scores": [], "tool_rewards": [0.25, 0.25]}
    assert found.stop_reason == "answered" and len(found.segments) == 1


def test_a_budget_leaves_what_a_derived_loop_returns(derived: Any, tmp_path: Path) -> None:
    tools = f"rollout.tools=[{tmp_path}/counting.yaml]"
    found = derived("derived", [CALL % 2, "done"], tools, "rollout.max_assistant_turns=1")
    assert [call.status for call in found.calls] == ["ok"] and found.stop_reason == "assistant_turn_budget"
    assert found.artifacts["verl"]["reward_score"] == 0.5


def test_a_derived_loop_asks_the_episodes_user(derived: Any) -> None:
    script, user = ["#### 41", "#### 42"], "rollout.interaction=gsm8k"
    found = derived("derived", script, user, "scoring.scorers={default: loop_reward}")
    assert found.stop_reason == "user_ended" and found.reward == 0.5
    assert found.artifacts["verl"]["extra_fields"]["turn_scores"] == [0.0, 1.0]


def test_names_of_register_are_known_to_rows(derived: Any, tmp_path: Path) -> None:
    assert len(derived("brief", ["It is 42."]).turns) == 1
    assert derived(None, ["It is 42."], f"rollout.agent={tmp_path}/derived_loops.py:Brief").artifacts["verl"]
    (tmp_path / "agents.yaml").write_text(f"- name: other\n  _target_: {tmp_path}/derived_loops.py:Derived\n")
    by_file = ("rollout.agent=null", f"verl.agents_file={tmp_path}/agents.yaml")
    assert derived("brief", ["It is 42."], *by_file).artifacts["verl"]["num_turns"] == 2
    with pytest.raises(PluginError, match="agent loop 'breif'.*brief"):
        derived("breif", ["It is 42."])
    with pytest.raises(PluginError, match="must register one agent loop, or name one: derived, brief"):
        derived(None, ["It is 42."], f"rollout.agent={tmp_path}/derived_loops.py")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm", "gpt-oss", "kimi", "deepseek_v4"])
def test_parsers_of_verls_names_read_our_formats(name: str, tmp_path: Path) -> None:
    (tmp_path / "parsers.py").write_text("from verl.experimental.agent_loop.tool_parser import ToolParser\n")
    parser_class = load(f"{tmp_path}/parsers.py:ToolParser", "agent loop")
    make_tokenizer(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = load_format(name).render_call(ToolCall("t000c0000", "add", {"a": "x"}))
    parser = parser_class.get_tool_parser(name, tokenizer)
    _, calls = asyncio.run(parser.extract_tool_calls(tokenizer.encode(text, add_special_tokens=False), []))
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": "x"})]
    with pytest.raises(ValueError, match="no tool parser 'llama4'"):
        parser_class.get_tool_parser("llama4", tokenizer)

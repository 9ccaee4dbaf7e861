"""Our agent loops inside verl: episodes over a server of its shape, and, with TURNWISE_VERL, its own worker and client."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

import turnwise.engines.bundled.tiny
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.errors import ConfigError, DataError, EngineError, EpisodeError, PluginError
from turnwise.ext.verl.inside.agent_loop import TurnwiseAgentLoop
from turnwise.ext.verl.inside.server import VerlServerSampler
from turnwise.ledger import NO_VERSION

HERE, TINY = Path(__file__).parent, Path(turnwise.engines.bundled.tiny.__file__).parent
REAL, DEPS = os.environ.get("TURNWISE_VERL", ""), os.environ.get("TURNWISE_VERL_DEPS", "")
DRAWN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "6*7"}}\n</tool_call>'
TASK = ("scoring.scorers={default: exact_match}", "rollout.tools=[calculate]")
ROW = {"raw_prompt": [{"role": "user", "content": "What is 6*7?"}], "data_source": "sums", "uid": "u1",
       "reward_model": {"ground_truth": "42"}, "extra_info": {"index": 3}, "priority": 5}  # fmt: skip


class Server:
    """verl's server manager, as its agent loops know it; it says these lines, a turn each."""

    def __init__(self, *lines: str, **told: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(TINY)
        self.lines, self.told, self.asked = list(lines), told, []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **more: Any) -> Any:
        line = self.lines[min(len(self.asked), len(self.lines) - 1)]
        self.asked.append((request_id, prompt_ids, sampling_params, more))
        ids = [*self.tokenizer.encode(line, add_special_tokens=False), 2][: sampling_params["max_tokens"]]
        logprobs = [-0.5] * len(ids)
        values = {"token_ids": ids, "log_probs": logprobs, "stop_reason": "completed", "num_preempted": 1}
        return SimpleNamespace(**{**values, "extra_fields": {"global_steps": len(self.asked)}, **self.told})


def loop(server: Any, entry: dict[str, Any], **rollout: Any) -> TurnwiseAgentLoop:
    whole = {"name": "vllm", "prompt_length": 512, "response_length": 128, **rollout}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": whole}})
    given = OmegaConf.create({"name": "turnwise", **entry})
    made: Any = {key: given[key] for key in given}
    return TurnwiseAgentLoop(SimpleNamespace(config=config), server, server.tokenizer, processor=None, **made)


def played(server: Any, *overrides: str, row: Any = ROW, params: Any = DRAWN, rollout: Any = (), **entry: Any) -> Any:
    entry = {"overrides": [*TASK, *overrides], **entry}
    outputs = asyncio.run(loop(server, entry, **dict(rollout)).play(params, **row))
    assert len(outputs) == 1
    return outputs[0]


def test_an_episode_is_given_back_token_by_token() -> None:
    server = Server(CALL, "42")
    found = played(server)
    (name, first, params, more), (again, second, _, _) = server.asked
    assert name == again and more == {"priority": 5}
    assert params["temperature"] == 1.0 and params["top_k"] == -1 and 2 in params["stop_token_ids"]
    wrote = [*server.tokenizer.encode(CALL, add_special_tokens=False), 2]
    answer = [*server.tokenizer.encode("42", add_special_tokens=False), 2]
    assert found.prompt_ids == first
    assert found.prompt_ids + found.response_ids == second + answer
    replies = len(found.response_ids) - len(wrote) - len(answer)
    assert replies > 0 and found.response_mask == [1] * len(wrote) + [0] * replies + [1] * len(answer)
    assert found.response_logprobs == [-0.5 * one for one in found.response_mask]
    assert found.reward_score == 1.0 and found.num_turns == 4
    assert found.extra_fields["reward_extra_info"] == {"acc": 1.0}
    assert found.extra_fields["turnwise"]["stop_reason"] == "answered"
    assert (found.extra_fields["min_global_steps"], found.extra_fields["max_global_steps"]) == (1, 2)
    assert found.metrics["num_preempted"] == 2


@pytest.mark.parametrize(
    ("told", "version"),
    [({"global_steps": 4}, 4), ({"min_global_steps": 3, "max_global_steps": 5}, NO_VERSION), ({}, NO_VERSION)],
)
def test_a_turn_across_steps_of_verls_has_no_one_version(told: dict[str, int], version: int) -> None:
    server = Server("42", extra_fields=told)
    sampler = VerlServerSampler(server, DRAWN, server.tokenizer.decode, 64, 128)
    asked = Request("c", np.array([1, 2]), SamplingParams(max_tokens=8), NoiseKey(0, 0, "s", 0))
    found = asyncio.run(sampler.generate(asked))
    assert [run.version for run in found.versions] == [version] and sampler.steps == list(told.values())


def test_a_users_words_are_not_the_policys() -> None:
    server = Server("#### 41", "#### 42")
    told = "rollout.interaction=gsm8k", "scoring.scorers={default: gsm8k}", "rollout.tools=[]"
    found = played(server, *told, row={**ROW, "data_source": "openai/gsm8k"})
    assert len(server.asked) == 2 and 0 in found.response_mask and len(found.extra_fields["turn_scores"]) == 2


def test_verls_lengths_are_kept_and_told() -> None:
    cut = played(Server("x " * 200), rollout={"response_length": 20})
    assert len(cut.response_ids) == 20 == sum(cut.response_mask)
    assert cut.extra_fields["turnwise"]["stop_reason"] in ("token_budget", "turn_truncated")
    with pytest.raises(EpisodeError, match=r"sample u1: the prompt has \d+ tokens.*prompt_length is 9"):
        played(Server("no"), rollout={"prompt_length": 9})
    filled = played(Server(CALL, "42"), rollout={"response_length": 40})
    assert filled.response_mask[-1] == 1 and len(filled.response_ids) <= 40
    own = Server("x " * 200)
    assert len(played(own, "sampling.max_tokens=7").response_ids) == 7 and own.asked[0][2]["max_tokens"] == 7


def test_failures_are_raised_or_masked_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EpisodeError, match="sample u1: scoring: .*gave no score"):
        played(Server("x"), "scoring.scorers={default: interaction}")
    found = played(Server("42"), "scoring.scorers={default: interaction}", on_failure="mask")
    assert sum(found.response_mask) == 0 and len(found.response_ids) > 1 and found.reward_score == 0.0
    assert found.extra_fields["turnwise"]["failure"].startswith("scoring:") and "not learnt from" in caplog.text
    empty = played(Server("no"), rollout={"prompt_length": 9}, on_failure="mask")
    assert (len(empty.prompt_ids), empty.response_mask, empty.response_logprobs) == (9, [0], [0.0])
    with pytest.raises(EngineError, match="no log-probs"):
        played(Server("x", log_probs=None))
    assert played(Server("42", log_probs=None), params={**DRAWN, "logprobs": False}).response_logprobs is None
    with pytest.raises(EngineError, match="3 tokens with"):
        played(Server("x", token_ids=[5, 6, 2]))


def test_a_server_that_goes_away_is_asked_again() -> None:
    class Shaky(Server):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            found = await super().generate(*args, **kwargs)
            if len(self.asked) == 1:
                found.stop_reason, found.token_ids, found.log_probs = "aborted", [], None
            return found

    found = played(Shaky("lost", "42"))
    assert found.reward_score == 1.0 and "broke the turn off" in found.extra_fields["turnwise"]["engine_lost"][0]


def test_verl_may_give_the_reward_itself() -> None:
    found = asyncio.run(loop(Server("42"), {"reward": "verl"}).play(DRAWN, **ROW))[0]
    assert found.reward_score is None and "reward_extra_info" not in found.extra_fields
    with pytest.raises(ConfigError, match=r"scoring.scorers: never read where the entry has reward: verl"):
        played(Server("x"), reward="verl")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"turnwise_cofig": "x.yaml"}, "unknown key 'turnwise_cofig': did you mean 'turnwise_config'"),
        ({"turnwise_config": "nowhere.yaml"}, "the agent-loop entry: no config file nowhere.yaml"),
        ({"overrides": "seed=1"}, "overrides is a list of texts"),
        ({"overrides": ["rollout.tool=[calculate]"]}, "the agent-loop entry: unknown key 'rollout.tool'"),
        ({"overrides": ["training.groups=4"]}, "training.groups: verl's trainer decides that"),
        ({"reward": "vrl"}, "did you mean 'verl'"),
        ({"on_failure": True}, "on_failure: unknown choice 'True'"),
        ({"several_sequences": "yes"}, "several_sequences is true or false"),
    ],
)
def test_an_entry_is_checked_before_the_first_episode(entry: dict[str, Any], problem: str) -> None:
    server = Server("x")
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        asyncio.run(loop(server, entry).play(DRAWN, **ROW))
    assert server.asked == []


def test_names_and_rows_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="calculatte"):
        played(Server("x"), "rollout.tools=[calculatte]")
    with pytest.raises(PluginError, match="tools_kwargs for the tool 'calc'"):
        played(Server("x"), row={**ROW, "extra_info": {"tools_kwargs": {"calc": {"create_kwargs": {"a": 1}}}}})
    with pytest.raises(DataError, match="raw_prompt"):
        played(Server("x"), row={**ROW, "raw_prompt": []})
    file = tmp_path / "rollouts.yaml"
    file.write_text("rollout: {tools: [calculate]}\nscoring: {scorers: {default: exact_match}}\n")
    found = asyncio.run(loop(Server("42"), {"turnwise_config": str(file)}).play(DRAWN, **ROW))
    assert found[0].reward_score == 1.0


BRANCHES = """
async def loop(chat):
    await chat.generate()
    side = chat.fork(chat.messages[:1], name="second")
    await side.generate()
"""


def test_several_sequences_are_given_back_only_where_verl_takes_them(tmp_path: Path) -> None:
    (tmp_path / "branching.py").write_text(BRANCHES)
    agent = f"rollout.agent={tmp_path}/branching.py:loop"
    with pytest.raises(EpisodeError, match="2 sequences and verl's worker takes one"):
        played(Server("42"), agent)
    entry = {"overrides": [*TASK, agent], "several_sequences": True}
    found = asyncio.run(loop(Server("42", "41"), entry).play(DRAWN, **ROW))
    assert [one.reward_score for one in found] == [1.0, 1.0] and found[0].response_ids != found[1].response_ids


def test_samples_share_what_is_opened_and_what_verl_does_not_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    server, entry = Server("42"), {"overrides": list(TASK)}

    async def both() -> list[Any]:
        made = [loop(server, entry, multi_turn={"max_user_turns": 2}) for _ in range(3)]
        return await asyncio.gather(*(one.play(DRAWN, **ROW) for one in made))

    assert [one[0].reward_score for one in asyncio.run(both())] == [1.0] * 3
    assert caplog.text.count("multi_turn.max_user_turns=2 is not read") == 1


def beside_verl(code: list[str], folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in (REAL, DEPS) if one)}
    done = subprocess.run(
        [sys.executable, *code], capture_output=True, text=True, timeout=500, cwd=folder, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


GIVEN_BACK = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
try:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
except ImportError as error:
    print(f"SKIP {error.msg}")
    sys.exit(0)
import test_inside_verl as shared
found = asyncio.run(shared.loop(shared.Server(shared.CALL, "42"), {"overrides": list(shared.TASK)}).run(
    shared.DRAWN, **shared.ROW))
assert isinstance(found, AgentLoopOutput), found
assert found.reward_score == 1.0 and found.num_turns == 4 and sum(found.response_mask) > 0
assert len(found.response_ids) == len(found.response_mask) == len(found.response_logprobs)
"""


@pytest.mark.skipif(not REAL, reason="TURNWISE_VERL names no folder with verl's files")
def test_what_is_given_back_is_verls(tmp_path: Path) -> None:
    if (said := beside_verl(["-c", GIVEN_BACK, str(HERE)], tmp_path)).startswith("SKIP"):
        pytest.skip(said.strip())


ENTRY = """
- name: turnwise
  _target_: turnwise.ext.verl.inside.agent_loop.TurnwiseAgentLoop
  overrides: ["task=arithmetic"{more}]
"""


@pytest.mark.skipif(not Path(REAL, "verl/workers/rollout/llm_server.py").exists(), reason="no verl of 0.8 or later")
def test_verls_own_worker_plays_our_episodes(tmp_path: Path) -> None:
    """Its AgentLoopWorker, client and load balancer on Ray; the server is an actor with the bundled model."""
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (tmp_path / "agents.yaml").write_text(ENTRY.format(more=""))
    (tmp_path / "wrong.yaml").write_text(ENTRY.format(more=', "rollout.max_asistant_turns=3"'))
    found = json.loads(beside_verl([str(HERE / "real_worker.py"), str(tmp_path)], tmp_path).splitlines()[-1])
    assert len(found["rows"]) == 6 and any(row["turns"] > 2 for row in found["rows"])
    for row in found["rows"]:
        prompt, sequence = row["prompt"], row["prompt"] + row["response"]
        turns = [one for one in found["asked"] if one[0][: len(prompt)] == prompt]
        mask, logprobs = [0] * len(sequence), [0.0] * len(sequence)
        for seen, wrote, drawn in turns:  # what the server saw and wrote is what is learnt, and nothing else
            assert sequence[: len(seen) + len(wrote)] == seen + wrote
            mask[len(seen) : len(seen) + len(wrote)] = [1] * len(wrote)
            logprobs[len(seen) : len(seen) + len(wrote)] = drawn
        assert turns and row["mask"] == mask[len(prompt) :] and row["mask"][-1] == 1
        assert row["logprobs"] == pytest.approx(logprobs[len(prompt) :], abs=1e-6)
        assert row["scores"][:-1] == [0.0] * (len(row["mask"]) - 1) and row["steps"] == [7, 7]
        assert row["acc"] in (0.0, 1.0) and row["extra"]["stop_reason"]
        assert row["extra"]["failure"] is None
    assert found["problems"]["wrong"].startswith("ConfigError: the agent-loop entry: unknown key")
    assert "the engine was lost in turn 0" in found["problems"]["server"]

"""The built-in loops with options, loops from a YAML file, and what is refused before a run."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import Config, RolloutConfig
from turnwise.config.sections import with_value
from turnwise.errors import ConfigError, PluginError
from turnwise.rollout.loops.loading import Loops
from turnwise.system.plugins import load
from turnwise.types import FinishReason, Origin, Role, StopReason

ME = __file__
CALL = '<tool_call>\n{"name": "shout", "arguments": {"text": "hi"}}\n</tool_call>'


def shout(text: str) -> str:
    """Shout.

    Args:
        text: what
    """
    return text.upper()


# --- checker ------------------------------------------------------------------------------------------------------


def reviewed(rollouts: Any, answers: list[str], reviews: list[str], **options: Any) -> Any:
    """A show whose reviewer says these words, one a branch."""

    def script(request: Any) -> str:
        if not request.noise.branch:
            return answers[min(request.turn, len(answers) - 1)]
        nth = int(request.noise.branch.removeprefix("checker").strip() or 1) - 1
        said = reviews[nth]
        return said.split("|")[min(request.turn, said.count("|"))]

    return rollouts.make(script, tools=[shout], agent="checker", agent_options=options)


def test_checker_sends_objections_back_until_it_agrees(rollouts):
    rollout = reviewed(
        rollouts, [CALL, "41", "42"], ["Off by one. Verdict: incorrect", "**Verdict:** correct"], trained=True
    )
    trajectory = rollout.play()
    assert trajectory.failure is None and trajectory.stop_reason is StopReason.ANSWERED
    assert [message.visible for message in trajectory.answers] == ["", "41", "42"]
    assert "Off by one" in trajectory.turns[1].replies[0].text and trajectory.turns[1].replies[0].role is Role.USER
    assert trajectory.artifacts["checks"] == ["incorrect", "correct"]
    assert [(branch.name, branch.trained) for branch in trajectory.branches] == [("checker", True), ("checker 2", True)]
    asked = trajectory.branches[0].messages[-2].text
    assert "What is 6 times 7?" in asked and "41" in asked
    assert trajectory.render_check is not None and trajectory.render_check.exact


@pytest.mark.parametrize(
    ("reviews", "verdicts", "answers"),
    [
        (["Verdict: incorrect", "Verdict: incorrect"], ["incorrect", "incorrect"], 3),
        (["I cannot say"], ["none"], 1),
        (["Not `verdict: incorrect`. Verdict: correct"], ["correct"], 1),
        ([CALL + "|Verdict: incorrect", "Verdict: correct"], ["incorrect", "correct"], 2),
    ],
)
def test_checker_ends_by_its_rule(rollouts, reviews, verdicts, answers):
    trajectory = reviewed(rollouts, ["41"], reviews, tools=True).play()
    assert trajectory.failure is None and trajectory.artifacts["checks"] == verdicts
    assert len(trajectory.answers) == answers and not any(branch.trained for branch in trajectory.branches)


def test_checker_that_is_cut_off_has_no_verdict(rollouts):
    rollout = reviewed(rollouts, ["41"], ["word " * 40])
    rollout.context.config.sampling.max_tokens = 20
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.artifacts["checks"] == ["none"]
    assert trajectory.branches[0].turns[0].finish_reason is FinishReason.LENGTH


# --- task functions -----------------------------------------------------------------------------------------------

sessions: dict[str, list[Any]] = {}
ended: list[tuple[str, bool]] = []


def ids_start(sid: str, ground_truth: str, **_: Any) -> dict[str, Any]:
    sessions[sid] = []
    return {"prompt_ids": [5, 6, 7], "started": 1, "sid": sid}


async def ids_obs(action_ids: list[int], sid: str) -> dict[str, Any]:
    sessions[sid].append(action_ids)
    done = len(sessions[sid]) == 3
    return {"done": done, "ids": [8, 9], "metrics": {"observations": 1}, "reward": 0.5 if done else None}


async def ids_end(sid: str, done: bool) -> dict[str, float]:
    ended.append((sid, done))
    return {"score": 2.0}


async def chat_start(**row: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Play."}], "tools": []}


def chat_obs(message: dict[str, Any], sid: str) -> dict[str, Any]:
    done = message["content"] == "stop"
    return {"finish": done, "messages": [{"role": "user", "content": "On."}], "reward": 1, "metrics": {"seen": 1}}


def bad_start(**row: Any) -> dict[str, Any]:
    return {"prompt_ids": [5, 6], "sid": 1}


async def slow_obs(action_ids: list[int], sid: str) -> dict[str, Any]:
    await asyncio.sleep(0.01)
    return {"done": True}


def broken_obs(action_ids: list[int], sid: str) -> dict[str, Any]:
    raise KeyError("nothing there")


def functions(start: str, obs: str) -> dict[str, str]:
    return {"start": f"{ME}:{start}", "obs": f"{ME}:{obs}", "end": f"{ME}:ids_end"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """This file as a task sees it is loaded a second time; both have the same books."""
    for name, book in (("sessions", sessions), ("ended", ended)):
        book.clear()
        monkeypatch.setattr(sys.modules[load(f"{ME}:own", "loop").__module__], name, book)


def test_task_functions_by_ids(rollouts):
    rollout = rollouts.make(
        ["one", "two", "three"], agent="task_functions", agent_options=functions("ids_start", "ids_obs")
    )
    group = asyncio.run(rollout.group(3))
    assert len(sessions) == 3 == len({sid for sid, _ in ended}) and all(done for _, done in ended)
    for trajectory in group.trajectories:
        assert trajectory.failure is None and len(trajectory.turns) == 3
        (ledger,) = trajectory.segments
        given = ledger.token_ids[ledger.origins == Origin.TOOL].tolist()
        assert given == [8, 9, 8, 9] and ledger.token_ids[:3].tolist() == [5, 6, 7]
        record = trajectory.facts.environment
        assert record.metrics == {"started": 1, "observations": 3, "score": 2} and record.reward == 0.5
        policy = ledger.token_ids[ledger.loss_mask].tolist()
        assert policy in [[token for action in actions for token in action] for actions in sessions.values()]


def test_task_functions_by_messages(rollouts):
    options = functions("chat_start", "chat_obs")
    trajectory = rollouts.make(["go", "stop"], agent="task_functions", agent_options=options).play()
    assert trajectory.failure is None and [message.text for message in trajectory.answers] == ["go", "stop"]
    assert trajectory.prompt[0].text == "Play." and trajectory.facts.environment.reward == 1
    assert trajectory.facts.environment.metrics == {"seen": 2, "score": 2} and len(ended) == 1


@pytest.mark.parametrize(
    ("start", "obs", "fails", "ends"),
    [("ids_start", "broken_obs", "nothing there", 2), ("bad_start", "slow_obs", "to two episodes at once", 1)],
)
def test_task_functions_that_fail_are_named_and_ended(rollouts, start, obs, fails, ends):
    rollout = rollouts.make(["one"], agent="task_functions", agent_options=functions(start, obs))
    rollout.sampler._latency = 0.001
    group = asyncio.run(rollout.group(2))
    assert any(fails in (trajectory.failure or "") for trajectory in group.trajectories)
    assert len(ended) == ends


def test_end_is_called_when_a_budget_ends_the_episode(rollouts):
    options = functions("ids_start", "ids_obs")
    rollout = rollouts.make(["one"], agent="task_functions", agent_options=options, max_assistant_turns=2)
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.ASSISTANT_TURN_BUDGET and [done for _, done in ended] == [False]


# --- names, options, files ----------------------------------------------------------------------------------------


async def own(chat: Any, *, times: int = 1, words: str | None = None) -> None:
    for _ in range(times):
        await chat.fork(chat.sample.prompt, name=words or "own").generate()
    await chat.generate()


class Classy:
    """Neither a loop of ours nor of verl's."""


@pytest.mark.parametrize(
    ("agent", "options", "words"),
    [
        ("checker", {"round": 3}, "unknown option 'round': did you mean 'rounds'"),
        ("checker", {"rounds": "three"}, "rounds='three' does not fit: Input should be a valid integer"),
        ("checker", {"rounds": 0}, "greater than or equal to 1"),
        ("single_turn", {"rounds": 1}, "unknown option 'rounds'"),
        ("task_functions", {"obs": f"{ME}:ids_obs"}, "needs the option 'start'"),
        ("task_functions", {"start": f"{ME}:ids_stat", "obs": f"{ME}:ids_obs"}, "did you mean 'ids_start'"),
        (f"{ME}:own", {"time": 2}, "did you mean 'times'"),
        (f"{ME}:Classy", {}, r"must be written as: async def Classy\(chat\)"),
        (None, {"rounds": 1}, "rollout.agent_options needs rollout.agent, which is not set"),
    ],
)
def test_wrong_options_are_refused_before_a_run(agent, options, words):
    with pytest.raises((ConfigError, PluginError), match=words):
        Loops(Config(rollout=RolloutConfig(agent=agent, agent_options=options))).get(agent)


def agents_file(folder: Path, text: str) -> str:
    (folder / "agents.yaml").write_text(text)
    return str(folder / "agents.yaml")


def test_loops_of_a_yaml_file(rollouts, tmp_path):
    (tmp_path / "beside.py").write_text("async def loop(chat, *, n: int):\n    for _ in range(n):\n        await chat.fork(chat.sample.prompt, name='b').generate()\n    await chat.generate()\n")  # fmt: skip
    file = agents_file(
        tmp_path,
        "- name: twice\n  _target_: beside.py:loop\n  n: 2\n"
        "- name: tool_agent\n  _target_: turnwise.rollout.loops.single_turn.single_turn\n",
    )
    trajectory = rollouts.make(["words"], agents_file=file, agent="twice").play()
    assert trajectory.failure is None and len(trajectory.branches) == 2
    loops = Loops(with_value(Config(), "verl.agents_file", file))
    assert loops.is_own("twice") and not loops.is_own("tool_agent") and loops.name_of("tool_agent") == "tool_agent"
    with pytest.raises(PluginError, match="did you mean 'twice'"):
        loops.get("twicee")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "expected a non-empty list"),
        ("- name: a\n  _taget_: x:y\n", "it needs _target_, not _taget_"),
        ("- name: a\n  _target_: 3\n", "_target_ must be text"),
        ("- name: a\n  _target_: x:y\n- name: a\n  _target_: x:y\n", "the name 'a' is taken"),
        ("- 3\n", "expected a mapping"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        Loops(with_value(Config(), "verl.agents_file", agents_file(tmp_path, text)))


def test_artifacts_that_cannot_be_kept_fail_the_episode(rollouts):
    async def loop(chat: Any) -> None:
        await chat.generate()
        chat.artifacts["what"] = object()

    rollout = rollouts.make(["words"])
    rollout.context.plan.loops._made |= {"tool_calling": loop, "single_turn": loop}
    assert "keeps 'what', which is not made of JSON values" in rollout.play().failure

"""verl.strict: what verl does where we do otherwise, and that nothing of it happens without the switch."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise import configure, evaluate
from turnwise.types import StopReason

CODE = """
from turnwise import tool
from verl.interactions.base import BaseInteraction


@tool
def ping(n: int = 0) -> str:
    '''Ping.'''
    return f"pong {n}"


@tool
def spell() -> str:
    '''Spell.'''
    return "".join(chr(97 + n % 26) for n in range(260))


@tool
def fail() -> str:
    '''Fail.'''
    raise ValueError("no luck")


class User(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        right = "42" in messages[-1]["content"]
        return right, "Right!" if right else "Try again.", float(right), {}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
"""
CALL = '<tool_call>{"name": "ping", "arguments": {"n": %d}}</tool_call>'


@pytest.fixture
def played(tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(CODE)
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "17"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))

    def play(strict: bool, script: list[str], *overrides: str) -> Any:
        settings = [
            "task=null", "engine=scripted", f"engine.script={json.dumps(script)}", f"runs_dir={tmp_path}/runs",
            f"data.eval_files={tmp_path}/rows.jsonl", f"scoring.scorers={{default: '{tmp_path}/mine.py:compute_score'}}",
            f"verl.strict={str(strict).lower()}", *(one.replace("MINE", f"{tmp_path}/mine.py") for one in overrides),
        ]  # fmt: skip
        (trajectory,) = evaluate(configure(*settings), console=Console(quiet=True)).trajectories
        assert trajectory.failure is None
        return trajectory

    return play


def test_calls_of_the_last_permitted_turn(played: Any) -> None:
    settings = ("rollout.tools=[MINE:ping]", "rollout.max_assistant_turns=1")
    ours, verls = (played(strict, [CALL % 1], *settings) for strict in (False, True))
    assert [call.status for call in ours.calls] == ["ok"] and verls.calls == []
    assert ours.stop_reason is verls.stop_reason is StopReason.ASSISTANT_TURN_BUDGET


def test_calls_beyond_the_limit_and_unreadable_ones(played: Any) -> None:
    settings = ("rollout.tools=[MINE:ping]", "rollout.max_parallel_calls=1")
    script = [f"{CALL % 1}{CALL % 2}", "done"]
    ours, verls = (played(strict, script, *settings) for strict in (False, True))
    assert [call.status for call in ours.calls] == ["ok", "refused"]
    assert [call.status for call in verls.calls] == ["ok"]
    assert [reply.text for reply in verls.turns[0].replies] == ["pong 1"]
    ours, verls = (played(strict, ["<tool_call>{</tool_call>", "done"], *settings) for strict in (False, True))
    assert len(ours.turns) == 2 and ours.calls[0].status == "malformed"
    assert len(verls.turns) == 1 and verls.stop_reason is StopReason.ANSWERED


def test_the_users_last_words_and_the_last_answer(played: Any) -> None:
    settings = ("rollout.interaction=MINE:User",)
    ours, verls = (played(strict, ["It is 17.", "It is 42."], *settings) for strict in (False, True))
    assert [message.text for message in ours.messages][-1] == "It is 42."
    assert [message.text for message in verls.messages][-1] == "Right!"
    assert ours.stop_reason is verls.stop_reason is StopReason.USER_ENDED
    assert not verls.segments[0].loss_mask[-1]  # it ends in the user's tokens
    capped = (*settings, "rollout.max_assistant_turns=1")
    ours, verls = (played(strict, ["It is 42."], *capped) for strict in (False, True))
    assert ours.turns[-1].user_score == 1.0 and verls.turns[-1].user_score is None


def test_reward_functions_get_the_whole_response(played: Any) -> None:
    settings = ("rollout.interaction=MINE:User",)
    ours, verls = (played(strict, ["It is 17.", "It is 42."], *settings) for strict in (False, True))
    assert ours.reward == 0.0 and verls.reward == 1.0  # the first answer counts there
    assert "It is 17." in verls.artifacts["solution_str"] and "Try again." in verls.artifacts["solution_str"]


def test_tool_replies_count_as_user_turns(played: Any) -> None:
    settings = ("rollout.tools=[MINE:ping]", "rollout.max_user_turns=1")
    ours, verls = (played(strict, [CALL % 1, CALL % 2, "done"], *settings) for strict in (False, True))
    assert len(ours.calls) == 2 and ours.stop_reason is StopReason.ANSWERED
    assert len(verls.calls) == 1 and verls.stop_reason is StopReason.USER_TURN_BUDGET


def test_calls_inside_thoughts(played: Any) -> None:
    script = [f"<think>Perhaps {CALL % 1}</think>{CALL % 2}", "done"]
    ours, verls = (played(strict, script, "rollout.tools=[MINE:ping]") for strict in (False, True))
    assert [call.call.arguments["n"] for call in ours.calls] == [2]
    assert [call.call.arguments["n"] for call in verls.calls] == [1, 2]
    assert len({call.call.id for call in verls.calls}) == 2 and len(verls.turns) == 2
    assert verls.segments[0].token_ids.tolist()[:20] == ours.segments[0].token_ids.tolist()[:20]


@pytest.mark.parametrize(
    ("keep", "shown"),
    [
        ("head", lambda text: f"{text[:40]}...(truncated)"),
        ("tail", lambda text: f"(truncated)...{text[-40:]}"),
        ("both", lambda text: f"{text[:20]}...(truncated)...{text[-20:]}"),
    ],
)
def test_replies_are_cut_by_characters(played: Any, keep: str, shown: Any) -> None:
    settings = ("rollout.tools=[MINE:spell]", "rollout.max_reply_tokens=10", f"rollout.keep={keep}")
    script = ['<tool_call>{"name": "spell", "arguments": {}}</tool_call>', "done"]
    ours, verls = (played(strict, script, *settings) for strict in (False, True))
    assert verls.turns[0].replies[0].text == shown("".join(chr(97 + n % 26) for n in range(260)))
    assert (
        "characters left out" in ours.turns[0].replies[0].text and ours.calls[0].truncated is verls.calls[0].truncated
    )


def test_what_the_model_reads_of_a_call_that_fails(played: Any) -> None:
    calls = [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("fail", "pong")]
    settings = ("rollout.tools=[MINE:fail, MINE:ping]",)
    ours, verls = (played(strict, [*calls, "done"], *settings) for strict in (False, True))
    said = [[turn.replies[0].text for turn in one.turns[:2]] for one in (ours, verls)]
    assert said[0][0] == "Error: ValueError: no luck" and "unknown tool 'pong'" in said[0][1]
    assert said[1] == ["Error when executing tool: no luck", "Error when executing tool: 'pong'"]
    assert [call.status for call in ours.calls] == [call.status for call in verls.calls] == ["crashed", "unknown_tool"]


def test_arguments_are_not_checked_before_a_tool_sees_them(played: Any) -> None:
    settings = ("rollout.tools=[MINE:ping]",)
    script = ['<tool_call>{"name": "ping", "arguments": {"n": 1, "m": 2}}</tool_call>', "done"]
    ours, verls = (played(strict, script, *settings) for strict in (False, True))
    assert ours.turns[0].replies[0].text.startswith("Error: bad arguments")
    assert verls.turns[0].replies[0].text.startswith("Error when executing tool: ")

"""compat.strict: what verl does where we do otherwise, and that nothing of it happens without the switch."""

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
            f"compat.strict={str(strict).lower()}", *(one.replace("MINE", f"{tmp_path}/mine.py") for one in overrides),
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

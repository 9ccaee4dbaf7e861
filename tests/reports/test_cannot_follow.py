"""An evaluation with a model that cannot follow the task says so, and what to do."""

from pathlib import Path

import pytest

from turnwise.reports.cannot_follow import cannot_follow
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Message,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)

RUN = Path("runs/first")


def episode(stop: StopReason, statuses: list[CallStatus], reward: float = 0.0) -> Trajectory:
    records = [CallRecord(ToolCall(f"call_{n}", "calculate", {}), status, 0.0) for n, status in enumerate(statuses)]
    turn = Turn(0, Message(Role.ASSISTANT, "words"), FinishReason.STOP, 0, prompt_tokens=1, completion_tokens=1)
    turn.calls = records
    made = Trajectory(
        sample=Sample("s", (Message(Role.USER, "?"),), "shop"), sibling=0, step=0, messages=[], turns=[turn],
        segments=[], stop_reason=stop, seconds=0.0,
    )  # fmt: skip
    made.reward = reward
    return made


CUT = episode(StopReason.TURN_TRUNCATED, [])
LOST = episode(StopReason.ANSWERED, [CallStatus.UNKNOWN_TOOL] * 3)
WRONG = episode(StopReason.ANSWERED, [CallStatus.OK])


@pytest.mark.parametrize(
    ("played", "sign"),
    [
        ([CUT] * 12, "12 of 12 episodes end in words that a limit cuts off"),
        ([CUT] * 9 + [WRONG], "9 of 10 episodes end in words that a limit cuts off"),
        ([LOST] * 4, "12 of 12 calls are of no tool that there is, such as 'calculate'"),
    ],
)
def test_who_cannot_follow_is_told_with_what_to_do(played, sign):
    text = cannot_follow(played, RUN)
    assert text is not None and sign in text
    assert "`turnwise show runs/first`" in text and "docs/models.md" in text and "`turnwise sft`" in text


@pytest.mark.parametrize(
    "played",
    [[], [WRONG] * 4, [CUT, WRONG], [LOST, WRONG, WRONG], [*[CUT] * 30, episode(StopReason.ANSWERED, [], 1.0)]],
    ids=["none", "wrong", "half", "some", "one right"],
)
def test_who_is_merely_wrong_is_not(played):
    assert cannot_follow(played, RUN) is None

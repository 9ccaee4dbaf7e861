"""A run directory and real trajectories to put into it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.ledger import TokenTrainingData
from turnwise.storage.run_dir import RunDir
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Ledger,
    Message,
    Origin,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)

Make = Callable[..., Trajectory]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """An empty run."""
    path = tmp_path / "runs" / "first"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("seed: 1\n")
    return RunDir(path)


def _call(number: int, code: str, status: CallStatus = CallStatus.OK, **info: Any) -> CallRecord:
    call = ToolCall(f"call_{number}", "python", {"code": code})
    return CallRecord(call, status, seconds=0.25 + number, info=info)


def make_trajectory(
    sample: str = "s0",
    *,
    source: str = "arithmetic",
    step: int = 1,
    sibling: int = 0,
    reward: float | None = 1.0,
    parts: dict[str, float] | None = None,
    question: str = "What is 6 times 7?",
    answer: str = "It is 42.",
    calls: list[CallRecord] | None = None,
    reply: str = "the result is 42",
    stop: StopReason = StopReason.ANSWERED,
    failure: str | None = None,
    learned: bool = False,
    **more: Any,
) -> Trajectory:
    """Two turns: tool calls (none with `calls=[]`), then an answer."""
    records = [_call(0, "print(6 * 7)")] if calls is None else calls
    prompt = (Message(Role.SYSTEM, "Be brief."), Message(Role.USER, question))
    turns = []
    if records:
        asks = Message(
            Role.ASSISTANT,
            "<think>let me see</think><tool_call>",
            tuple(record.call for record in records),
            reasoning="let me see",
            answer="",
        )
        replies = [Message(Role.TOOL, reply, tool_call_id=r.call.id, name=r.call.name) for r in records]
        turns.append(Turn(0, asks, FinishReason.STOP, 3, 2, 2, calls=records, replies=replies))
    last = Message(Role.ASSISTANT, answer, answer=answer)
    turns.append(Turn(len(turns), last, FinishReason.STOP, 3, 6, 2, generate_seconds=0.5))
    ledger = Ledger()
    ledger.append([5, 6], Origin.PROMPT, 0)
    for turn in turns:
        ledger.append([7, 8], Origin.POLICY, turn.index, [-0.5, -0.25], 0)
        if turn.replies:
            ledger.append([9], Origin.TOOL, turn.index)
    if learned:
        mask = ledger.loss_mask
        ledger.training = TokenTrainingData(
            logprobs=[-0.75 if own else 0.0 for own in mask],
            new_logprobs=[-0.5 if own else 0.0 for own in mask],
            entropies=[0.5 if own else 0.0 for own in mask],
        )
    said = [message for turn in turns for message in (turn.message, *turn.replies)]
    return Trajectory(
        sample=Sample(sample, prompt, source, ground_truth="42", **more.pop("sample_fields", {})),
        sibling=sibling,
        step=step,
        messages=[*prompt, *said],
        turns=turns,
        segments=[ledger],
        stop_reason=stop,
        seconds=1.5,
        failure=failure,
        reward=reward,
        parts={} if parts is None and reward is None else parts if parts is not None else {"acc": float(reward or 0)},
        **more,
    )


@pytest.fixture(scope="session")
def make() -> Make:
    """Makes trajectories: `make("s0", reward=0.5, calls=[])`."""
    return make_trajectory


@pytest.fixture(scope="session")
def call() -> Callable[..., CallRecord]:
    """Makes call records: `call(0, "print(1)", CallStatus.ERROR, reason="...")`."""
    return _call

"""From `train()` to the gradient it is few calls: counted on the real stack of one small step."""

import asyncio
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from rich.console import Console

import turnwise
from turnwise import configure, train

MOST_CALLS = 8
PACKAGE = str(Path(turnwise.__file__).parent)
CONFIG = (
    "training.steps=1", "training.groups=2", "training.group_size=2", "eval.samples=2", "sampling.max_tokens=16",
    "training.max_logprob_gap=1", "algorithm.entropy=0.01", "engine.threads=1",
)  # fmt: skip


def named(frame: FrameType | None) -> list[str]:
    """The functions of the package on a stack, outermost first."""
    names = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_code.co_name.startswith("<"):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[::-1]


def test_the_gradient_is_few_calls_below_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[list[str]] = []
    backward, to_thread = torch.Tensor.backward, asyncio.to_thread

    async def noted(*arguments, **keywords):  # the coroutines that wait for the thread are on the stack here
        calls = named(sys._getframe())
        if "learn" in calls:  # episodes have tasks of their own
            waiting[:] = calls
        return await to_thread(*arguments, **keywords)

    def stop(tensor: torch.Tensor, *arguments: object) -> None:
        stacks.append([*waiting, *named(sys._getframe(1))])
        backward(tensor, *arguments)

    waiting: list[str] = []
    monkeypatch.setattr(asyncio, "to_thread", noted)
    monkeypatch.setattr(torch.Tensor, "backward", stop)
    train(configure(*CONFIG, f"runs_dir={tmp_path}"), console=Console(quiet=True))
    calls = stacks[0][stacks[0].index("train_prepared") :]  # before it is what lets signals stop the run
    assert calls[-1] == "accumulate", calls
    assert len(calls) <= MOST_CALLS, calls

"""What has a learner in a process that was started for it, and answers the run's calls there."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.engines.learners.learner import Objective, TokenBatch, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.watching import count_progress
from turnwise.engines.learners.weight_block import DeviceMemory, MappedMemory, checksum, fill


@dataclass(frozen=True, slots=True)
class LearnerReply:
    """What a call gave, and what the learner is like after it."""

    value: Any
    step: int
    token_budget: int
    notes: tuple[str, ...]
    """What the learner had to say."""


@dataclass(frozen=True, slots=True)
class HostedLearner:
    """A learner that was opened in another process, as the run has to know it."""

    learner: LocalLearner
    exact: bool
    """Whether it finds the sampler's log-probs again to the last bit."""


@dataclass(frozen=True, slots=True)
class HostedFacts:
    """What does not change of it."""

    shapes: Mapping[str, tuple[int, ...]]
    device: str
    exact: bool
    process: int


Make = Callable[[Callable[[str], None]], HostedLearner]
"""Opens the learner, which says what it has to say to the function that it is given. It travels to the process."""


class LearnerHost:
    """Opened by `ProcessGroup` in a learner's own process; every method answers with a `LearnerReply`."""

    def __init__(self, make: Make, published: str) -> None:
        """`published` is the number format that weights are handed over in, as torch calls it."""
        self._notes: list[str] = []
        self._hosted, self._published = make(self._notes.append), getattr(torch, published)
        self._learner = self._hosted.learner
        self._shapes = {name: tuple(shape) for name, shape in self._learner.weights().shapes.items()}
        self._block: Tensor | None = None
        count_progress()

    def facts(self) -> LearnerReply:
        return self._reply(HostedFacts(self._shapes, str(self._learner.device), self._hosted.exact, os.getpid()))

    def attach(self, memory: MappedMemory | DeviceMemory) -> LearnerReply:
        """Use this block from now on; answers with what is in it once the weights are."""
        self._block = memory.open()
        self._fill(self._block)
        return self._reply(checksum(self._block))

    def hand_over(self) -> LearnerReply:
        """Put the present weights into the block."""
        assert self._block is not None, "attach comes first"
        self._fill(self._block)
        return self._reply(None)

    def _fill(self, block: Tensor) -> None:
        with torch.no_grad():
            fill(block, self._shapes, self._published, self._learner.weights().tensors)

    def score(self, batch: TokenBatch, who: Who) -> LearnerReply:
        return self._reply(self._learner.score(batch, who))

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> LearnerReply:
        return self._reply(self._learner.update(batches, objective))

    def save(self, folder: Path) -> LearnerReply:
        self._learner.save(folder)
        return self._reply(None)

    def load(self, folder: Path) -> LearnerReply:
        self._learner.load(folder)
        return self._reply(None)

    def save_policy(self, folder: Path) -> LearnerReply:
        self._learner.save_policy(folder)
        return self._reply(None)

    def save_adapter(self, folder: Path) -> LearnerReply:
        return self._reply(self._learner.save_adapter(folder))

    def _reply(self, value: Any) -> LearnerReply:
        notes = tuple(self._notes)
        self._notes.clear()
        return LearnerReply(value, self._learner.step, self._learner.token_budget, notes)

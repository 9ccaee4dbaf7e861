"""Trajectories to flat training sequences: the recorded tokens with a mask over exactly the policy's."""

from collections.abc import Iterable
from dataclasses import dataclass

from turnwise.types import Trajectory


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One flat sequence: `TrainSequence((5, 6, 9), (False, False, True), (0.0, 0.0, -0.3))`."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.loss_mask) == len(self.logprobs):
            raise ValueError("token ids, loss mask and logprobs differ in length")


def to_sequences(trajectories: Iterable[Trajectory]) -> list[TrainSequence]:
    """One sequence per ledger segment that holds policy tokens; tokens are taken as recorded, never rebuilt."""
    return [
        TrainSequence(tuple(ledger.token_ids), tuple(ledger.loss_mask), tuple(ledger.logprobs))
        for trajectory in trajectories
        for ledger in trajectory.segments
        if any(ledger.loss_mask)
    ]


def batches(sequences: list[TrainSequence], order: Iterable[int], token_budget: int) -> Iterable[list[TrainSequence]]:
    """Sequences in this order, as many to a batch as the token budget takes (one at least)."""
    batch: list[TrainSequence] = []
    size = 0
    for index in order:
        length = len(sequences[index].token_ids)
        if batch and size + length > token_budget:
            yield batch
            batch, size = [], 0
        batch.append(sequences[index])
        size += length
    if batch:
        yield batch

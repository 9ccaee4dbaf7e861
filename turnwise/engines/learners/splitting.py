"""A batch as smaller ones: whole trajectories each, with gradients that add up to its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch

from turnwise.engines.learners.device_batch import PER_TOKEN
from turnwise.engines.learners.learner import Floats, Ints, TokenBatch
from turnwise.ledger import MediaSpan


@dataclass(frozen=True, slots=True, eq=False)
class BatchPart:
    """Some trajectories of a batch."""

    batch: TokenBatch
    places: Ints
    """[n] which of the whole batch's policy tokens these are."""


def whole(batch: TokenBatch) -> BatchPart:
    """The whole batch as one part."""
    return BatchPart(batch, np.arange(len(batch.index)))


def halves(part: BatchPart) -> list[BatchPart]:
    """Two parts of about as many tokens; of a single trajectory, that one alone.

    A sequence without a policy token belongs to no trajectory and has no gradient: it is in neither.
    """
    batch = part.batch
    owners, order = owners_of(batch)
    if len(order) < 2:
        return [part]
    sizes = np.bincount(owners[owners >= 0], weights=batch.lengths[owners >= 0])[order]
    cut = int(np.abs(np.cumsum(sizes)[:-1] - sizes.sum() / 2).argmin()) + 1
    return [chosen(part, owners, np.sort(trajectories)) for trajectories in (order[:cut], order[cut:])]


def owners_of(batch: TokenBatch) -> tuple[Ints, Ints]:
    """[S] the trajectory that each sequence is of, -1 without a policy token; and the trajectories in their order."""
    owners = np.full(len(batch.lengths), -1)
    owners[np.searchsorted(np.cumsum(batch.lengths), batch.index, side="right")] = batch.trajectory
    present, first = np.unique(owners[owners >= 0], return_index=True)
    return owners, present[np.argsort(first)]


def chosen(part: BatchPart, owners: Ints, trajectories: Ints) -> BatchPart:
    """The part that holds these trajectories only; their numbers come in ascending order."""
    batch = part.batch
    sequences = np.isin(owners, trajectories)
    tokens = np.repeat(sequences, batch.lengths)
    written = tokens[batch.index]
    arrays = {name: getattr(batch, name) for name in PER_TOKEN}
    places = np.cumsum(tokens) - 1
    cut: dict[str, Any] = {name: None if array is None else array[written] for name, array in arrays.items()}
    smaller = replace(
        batch,
        tokens=batch.tokens[tokens],
        lengths=batch.lengths[sequences],
        index=places[batch.index[written]],
        media=tuple(MediaSpan(span.media, int(places[span.start])) for span in batch.media if tokens[span.start]),
        trajectory=np.searchsorted(trajectories, batch.trajectory[written]),
        trajectory_tokens=batch.trajectory_tokens[trajectories],
        experts=None if batch.experts is None else batch.experts[tokens],
        **cut,
    )
    return BatchPart(smaller, part.places[written])


class Attempt:
    """One part of a batch that is tried: running out of memory is noted, and the part is then tried in halves."""

    def __init__(self, part: BatchPart) -> None:
        self.part = part
        self.refused: str | None = None

    def __enter__(self) -> None:
        """Nothing is prepared: only what the work raises counts."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, torch.OutOfMemoryError):
            self.refused = str(error)
        return self.refused is not None


def laid_out(values: Floats, parts: Sequence[BatchPart]) -> Floats:
    """The values of the parts of a batch, which come one part behind the other, in the order of the batch."""
    if len(parts) == 1:
        return values
    ordered = np.empty_like(values)
    ordered[np.concatenate([part.places for part in parts])] = values
    return ordered

"""A minibatch dealt out over ranks: whole trajectories, about as many tokens for each, as many passes for all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.engines.learners.device_batch import PER_TOKEN
from turnwise.engines.learners.splitting import BatchPart, chosen, owners_of, whole
from turnwise.engines.learners.token_batch import Floats, Ints, TokenBatch
from turnwise.errors import EngineError

ARRAYS = ("sampler_logprobs", *PER_TOKEN)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank computes in one pass."""

    batch: TokenBatch
    places: Ints
    """[n] which of the policy tokens of all batches, end to end, these are."""


Shares = list[list[Share | None]]
"""By rank and pass; None where a rank has nothing left and only joins in."""


def deal(batches: Sequence[TokenBatch], ranks: int, token_budget: int) -> Shares:
    """Every trajectory to one rank and one pass; a pass has at most `token_budget` tokens unless a single one has more.

    A function of the batches alone: largest first, each to the rank that has the fewest tokens so far.
    """
    owners = [owners_of(batch) for batch in batches]
    units: list[tuple[int, int, int]] = []
    """Tokens, batch and trajectory of each."""
    for number, (batch, (of, order)) in enumerate(zip(batches, owners, strict=True)):
        sizes = np.bincount(of[of >= 0], weights=batch.lengths[of >= 0])
        units += [(int(sizes[one]), number, int(one)) for one in order]
    own: list[list[list[tuple[int, int]]]] = [[] for _ in range(ranks)]
    room: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for size, number, one in sorted(units, key=lambda unit: -unit[0]):
        rank = load.index(min(load))
        load[rank] += size
        fitting = next((place for place, left in enumerate(room[rank]) if size <= left), None)
        if fitting is None:
            own[rank].append([(number, one)])
            room[rank].append(token_budget - size)
        else:
            own[rank][fitting].append((number, one))
            room[rank][fitting] -= size
    starts = np.cumsum([0, *(len(batch.index) for batch in batches)])

    def share(some: list[tuple[int, int]]) -> Share:
        parts: list[BatchPart] = []
        for number in sorted({number for number, _ in some}):
            wanted = np.array(sorted(one for home, one in some if home == number))
            part = chosen(whole(batches[number]), owners[number][0], wanted)
            parts.append(BatchPart(part.batch, part.places + starts[number]))
        return _joined(parts)

    passes = max(map(len, own))
    return [[share(some) for some in mine] + [None] * (passes - len(mine)) for mine in own]


def laid_out(found: Sequence[Sequence[Floats]], shares: Shares, batches: Sequence[TokenBatch]) -> list[Floats]:
    """What the ranks found in their passes, as one array for each batch."""
    every = np.zeros(sum(len(batch.index) for batch in batches), np.float32)
    for mine, arrays in zip(shares, found, strict=True):
        for share, array in zip(mine, arrays, strict=True):
            if share is not None:
                every[share.places] = array
    return np.split(every, np.cumsum([len(batch.index) for batch in batches])[:-1])


def _joined(parts: Sequence[BatchPart]) -> Share:
    """Parts of one minibatch end to end."""
    given = [part.batch for part in parts]
    first = given[0]
    counts = {(one.minibatch_tokens, one.minibatch_trajectories) for one in given}
    lacking = [name for name in ARRAYS if len({getattr(one, name) is None for one in given}) > 1]
    if len(counts) > 1 or lacking:
        raise EngineError(f"batches of one update differ in {', '.join(lacking) or 'the size of their minibatch'}")
    tokens = np.cumsum([0, *(len(one.tokens) for one in given)])
    owners = np.cumsum([0, *(len(one.trajectory_tokens) for one in given)])

    arrays: dict[str, Any] = {
        name: None if getattr(first, name) is None else np.concatenate([getattr(one, name) for one in given])
        for name in ARRAYS
    }
    batch = TokenBatch(
        tokens=np.concatenate([one.tokens for one in given]),
        lengths=np.concatenate([one.lengths for one in given]),
        index=np.concatenate([one.index + start for one, start in zip(given, tokens, strict=False)]),
        trajectory=np.concatenate([one.trajectory + start for one, start in zip(given, owners, strict=False)]),
        trajectory_tokens=np.concatenate([one.trajectory_tokens for one in given]),
        minibatch_tokens=first.minibatch_tokens,
        minibatch_trajectories=first.minibatch_trajectories,
        media=tuple(span.shifted(int(by)) for one, by in zip(given, tokens, strict=False) for span in one.media),
        **arrays,
    )
    return Share(batch, np.concatenate([part.places for part in parts]))

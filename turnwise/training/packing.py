"""Sequences to minibatches to packed micro-batches, in an order that depends on the seed and on nothing else.

Legend: T tokens of a packed batch, N policy tokens among them, S sequences, K trajectories they are segments of.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.learners.learner import TokenBatch
from turnwise.engines.model.routing import Experts, not_noted
from turnwise.errors import ConfigError, DataError
from turnwise.training.sequences import LEFT_OUT, TrainSequence


def minibatches(sequences: Sequence[TrainSequence], count: int, *, seed: int, epoch: int) -> list[list[TrainSequence]]:
    """The step's sequences in `count` nearly equal parts, shuffled anew each epoch.

    Whole trajectories are dealt out, so that segments of one trajectory share an update. `seed` should name the step
    too; the same seed and epoch give the same parts.
    """
    trajectories: dict[int, list[TrainSequence]] = {}
    for sequence in sequences:
        trajectories.setdefault(sequence.trajectory, []).append(sequence)
    if not 1 <= count <= len(trajectories):
        raise ConfigError(f"{len(trajectories)} trajectories cannot be dealt out over {count} minibatches")
    order = list(trajectories)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    cuts = [len(order) * part // count for part in range(count + 1)]
    return [
        [sequence for number in order[start:end] for sequence in trajectories[number]]
        for start, end in itertools.pairwise(cuts)
    ]


def fill(sequences: Sequence[TrainSequence], token_budget: int, *, together: bool = False) -> list[list[TrainSequence]]:
    """As few parts of at most `token_budget` tokens as first-fit by falling length finds.

    What is longer than the budget gets a part to itself. `together` keeps the segments of a trajectory in one part.
    The result is a function of the order and lengths alone.
    """
    if token_budget < 1:
        raise ConfigError(f"a token budget of {token_budget} holds nothing")
    units: dict[int, list[int]] = {}
    for at, sequence in enumerate(sequences):
        units.setdefault(sequence.trajectory if together else at, []).append(at)
    lengths = {key: sum(len(sequences[at].token_ids) for at in unit) for key, unit in units.items()}
    parts: list[list[int]] = []
    room: list[int] = []
    for key in sorted(units, key=lambda key: -lengths[key]):
        fitting = next((number for number, left in enumerate(room) if lengths[key] <= left), None)
        if fitting is None:
            parts.append(list(units[key]))
            room.append(token_budget - lengths[key])
        else:
            parts[fitting] += units[key]
            room[fitting] -= lengths[key]
    return [[sequences[at] for at in sorted(part)] for part in parts]


def tokens_by_trajectory(sequences: Sequence[TrainSequence]) -> dict[int, int]:
    """The policy tokens of each trajectory; a minibatch holds whole trajectories."""
    counts: dict[int, int] = {}
    for sequence in sequences:
        counts[sequence.trajectory] = counts.get(sequence.trajectory, 0) + sequence.policy_tokens
    return counts


def gather(sequences: Sequence[TrainSequence], name: str) -> NDArray[Any]:
    """[N] one array at the policy's tokens of all sequences, end to end."""
    return np.concatenate([sequence.gather(name) for sequence in sequences])


def write(sequences: Sequence[TrainSequence], name: str, values: NDArray[np.floating[Any]]) -> None:
    """Lay [N] values, one for each policy token of the sequences end to end, back into them."""
    tokens = sum(sequence.policy_tokens for sequence in sequences)
    if values.shape != (tokens,):
        raise ValueError(f"{values.shape} {name} for {tokens} policy tokens")
    start = 0
    for sequence in sequences:
        end = start + sequence.policy_tokens
        sequence.write(name, values[start:end])
        start = end


def pack(sequences: Sequence[TrainSequence], whole: Mapping[int, int]) -> TokenBatch:
    """Put sequences end to end; an array is taken when all have it and refused when only some do.

    `whole` is `tokens_by_trajectory` of the minibatch that the sequences are part of.
    """
    for sequence in sequences:
        _check(sequence)

    def gathered(name: str) -> NDArray[np.float32] | None:
        missing = [sequence.trajectory for sequence in sequences if getattr(sequence, name) is None]
        if len(missing) == len(sequences):
            return None
        if missing:
            raise ValueError(f"some sequences have {name}, that of trajectory {missing[0]} has not")
        return gather(sequences, name).astype(np.float32)

    lengths = np.array([len(sequence.token_ids) for sequence in sequences])
    counts = [sequence.policy_tokens for sequence in sequences]
    numbers = {number: at for at, number in enumerate(dict.fromkeys(sequence.trajectory for sequence in sequences))}
    starts = np.cumsum(lengths) - lengths
    return TokenBatch(
        tokens=np.concatenate([sequence.token_ids for sequence in sequences]),
        lengths=lengths,
        index=np.concatenate([sequence.policy for sequence in sequences]) + np.repeat(starts, counts),
        trajectory=np.repeat([numbers[sequence.trajectory] for sequence in sequences], counts),
        trajectory_tokens=np.array([whole[number] for number in numbers]),
        minibatch_tokens=sum(whole.values()),
        minibatch_trajectories=len(whole),
        old_logprobs=gathered("old_logprobs"),
        ref_logprobs=gathered("ref_logprobs"),
        values=gathered("values"),
        advantages=gathered("advantages"),
        returns=gathered("returns"),
        weights=gathered("weights"),
        media=tuple(
            span.shifted(start)
            for sequence, start in zip(sequences, starts.tolist(), strict=True)
            for span in sequence.media
        ),
        experts=_experts(sequences),
    )


def _experts(sequences: Sequence[TrainSequence]) -> Experts | None:
    """[T, routers, k] of all sequences; those of which nothing was noted, such as episodes read from a file, choose by
    themselves."""
    like = next((sequence.experts for sequence in sequences if sequence.experts is not None), None)
    if like is None:
        return None
    return np.concatenate(
        [
            not_noted(len(sequence.token_ids), like) if sequence.experts is None else sequence.experts
            for sequence in sequences
        ]
    )


def _check(sequence: TrainSequence) -> None:
    sequence.check()
    if not sequence.policy_tokens:
        raise DataError(f"a sequence of trajectory {sequence.trajectory} holds no policy token")
    if sequence.loss_mask[0]:
        raise DataError(
            f"a sequence of trajectory {sequence.trajectory} starts with a policy token: nothing to predict it from"
        )
    if sequence.group == LEFT_OUT and sequence.advantages is not None:
        raise ValueError(
            f"trajectory {sequence.trajectory} is left out of the baselines; drop it with `trainable` before packing"
        )

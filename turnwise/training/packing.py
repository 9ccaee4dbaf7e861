"""Sequences to minibatches to packed micro-batches, in an order that depends on the seed and on nothing else.

Legend: T tokens of a packed batch, N policy tokens among them, S sequences, K trajectories they are segments of.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import ConfigError, DataError
from turnwise.training.sequences import LEFT_OUT, OPTIONAL, TrainSequence


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: its sequences end to end, and what they hold at the policy's tokens.

    `trajectory_tokens`, `minibatch_tokens` and `minibatch_trajectories` count the whole minibatch, so that the
    gradients of its micro-batches add up to the gradient of one big batch. An array is None when its sequences have
    none.
    """

    tokens: Tensor
    """[T] token ids."""
    lengths: tuple[int, ...]
    """[S] tokens of each sequence."""
    index: Tensor
    """[N] position of each policy token among the T."""
    trajectory: Tensor
    """[N] which of the K trajectories a policy token belongs to."""
    trajectory_tokens: Tensor
    """[K] policy tokens of each trajectory, those of its segments in other micro-batches included."""
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None
    advantages: Tensor | None
    returns: Tensor | None
    weights: Tensor | None
    minibatch_tokens: int
    """Policy tokens of the whole minibatch."""
    minibatch_trajectories: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        if self.tokens.device == device:
            return self
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {name: v.to(device) for name, v in moved.items() if isinstance(v, Tensor)}
        return replace(self, **tensors)

    def trajectory_sums(self, values: Tensor) -> Tensor:
        """[K] the sum over each trajectory's policy tokens here of a value per policy token, with gradient."""
        return values.new_zeros(len(self.trajectory_tokens)).index_add(0, self.trajectory, values)


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
    found: dict[int, int] = {}
    for sequence in sequences:
        found[sequence.trajectory] = found.get(sequence.trajectory, 0) + sequence.policy_tokens
    return found


def write(sequences: Sequence[TrainSequence], name: str, values: Tensor) -> None:
    """Lay what the learner computed for the N policy tokens of packed sequences back into them."""
    if name not in OPTIONAL:
        raise ValueError(f"{name!r} is not an array that is written later")
    counts = [sequence.policy_tokens for sequence in sequences]
    if tuple(values.shape) != (sum(counts),):
        raise ValueError(f"{tuple(values.shape)} {name} for {sum(counts)} policy tokens")
    rows = iter(values.detach().tolist())
    for sequence, count in zip(sequences, counts, strict=True):
        setattr(sequence, name, sequence.scatter(list(itertools.islice(rows, count))))


def pack(sequences: Sequence[TrainSequence], whole: Mapping[int, int]) -> Batch:
    """Put sequences end to end; an array is taken when all have it and refused when only some do.

    `whole` is `tokens_by_trajectory` of the minibatch that the sequences are part of.
    """
    index: list[int] = []
    owner: list[int] = []
    numbers: dict[int, int] = {}
    start = 0
    for sequence in sequences:
        _check(sequence)
        found = [start + at for at, flag in enumerate(sequence.loss_mask) if flag]
        index += found
        owner += [numbers.setdefault(sequence.trajectory, len(numbers))] * len(found)
        start += len(sequence.token_ids)

    def gathered(name: str) -> Tensor | None:
        missing = [sequence.trajectory for sequence in sequences if getattr(sequence, name) is None]
        if len(missing) == len(sequences):
            return None
        if missing:
            raise ValueError(f"some sequences have {name}, that of trajectory {missing[0]} has not")
        row = [value for sequence in sequences for value in sequence.gather(name)]
        return torch.tensor(row, dtype=torch.float32)

    sampler_logprobs = gathered("logprobs")
    assert sampler_logprobs is not None
    return Batch(
        tokens=torch.tensor([token for s in sequences for token in s.token_ids]),
        lengths=tuple(len(sequence.token_ids) for sequence in sequences),
        index=torch.tensor(index),
        trajectory=torch.tensor(owner),
        trajectory_tokens=torch.tensor([whole[number] for number in numbers]),
        sampler_logprobs=sampler_logprobs,
        old_logprobs=gathered("old_logprobs"),
        ref_logprobs=gathered("ref_logprobs"),
        values=gathered("values"),
        advantages=gathered("advantages"),
        returns=gathered("returns"),
        weights=gathered("weights"),
        minibatch_tokens=sum(whole.values()),
        minibatch_trajectories=len(whole),
    )


def _check(sequence: TrainSequence) -> None:
    sequence.check()
    if not any(sequence.loss_mask):
        raise DataError(f"a sequence of trajectory {sequence.trajectory} holds no policy token")
    if sequence.loss_mask[0]:
        raise DataError(
            f"a sequence of trajectory {sequence.trajectory} starts with a policy token: nothing to predict it from"
        )
    if sequence.group == LEFT_OUT and sequence.advantages is not None:
        raise ValueError(
            f"trajectory {sequence.trajectory} is left out of the baselines; drop it with `trainable` before packing"
        )

"""Trajectories to flat training sequences: the recorded tokens with a mask over exactly the policy's."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from turnwise.engines.model.routing import Experts, not_noted
from turnwise.errors import DataError
from turnwise.ledger import MediaSpan, TokenTrainingData
from turnwise.types import Group, Trajectory, Turn

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LEFT_OUT = -1
"""The group of a sequence that belongs to no baseline: its trajectory failed, or came without a group."""
OPTIONAL = (
    "old_logprobs", "first_logprobs", "ref_logprobs", "values", "kl_penalties", "advantages", "returns", "weights",
    "new_logprobs", "entropies",
)  # fmt: skip
"""The arrays that are written later; None before."""


@dataclass(slots=True, eq=False)
class TrainSequence:
    """One ledger segment on its way to the gradient. Every array is as long as `token_ids`, zero off the mask.

    Of the tokens 5, 6, 9 with the policy's at the end: `token_ids` 5, 6, 9, `policy` 2, `logprobs` 0, 0, -0.3. A field
    that starts None names its single writer, who uses `write`; an array is replaced, never changed in place.
    """

    token_ids: Ints
    loss_mask: NDArray[np.bool_]
    """True exactly at the policy's tokens."""
    logprobs: Floats
    """The sampler's."""
    turns: NDArray[np.int32]
    versions: NDArray[np.int32]
    """Which weights wrote each of the policy's tokens; one number is that of all."""
    trajectory: int
    """Index into the step's trajectories; the segments of one trajectory share it and keep their order."""
    group: int
    """Index of the group; LEFT_OUT when the trajectory has no part in a baseline and is not trained by reward."""
    reward: float
    """The trajectory's; nan when nothing scored it."""
    turn_scores: dict[int, float] = field(default_factory=dict)
    """What scoring thought of the trajectory's turns, its other segments' included; the others were not scored."""
    old_logprobs: Floats | None = None
    """Written by optimise: what the ratio is taken against, the sampler's or the learner's before the first update."""
    first_logprobs: Floats | None = None
    """Written by optimise: the learner's before the first update of this step, where it computed them."""
    ref_logprobs: Floats | None = None
    """Written by optimise when a reference is used."""
    values: Floats | None = None
    """Written by optimise when a critic is used."""
    kl_penalties: Floats | None = None
    """Written by kl.penalise when KL is part of the reward: subtracted from it, token by token."""
    advantages: Floats | None = None
    """Written by advantages.assign."""
    returns: Floats | None = None
    """Written by advantages.assign where the estimator has token-level returns."""
    weights: Floats | None = None
    """Written by importance.correct: multiplies the policy loss, 0 rejects a token."""
    new_logprobs: Floats | None = None
    """Written by optimise: the learner's in the last update that used the sequence."""
    entropies: Floats | None = None
    """Written by optimise, with them."""
    segment: int = 0
    """Which of the trajectory's ledgers this is."""
    branch: int = 0
    """Which of its conversations this belongs to: 0 is the main one. Each ends in the trajectory's reward."""
    reused: bool = False
    """Whether an earlier step trained on it too: it says nothing of how the policy does now."""
    media: tuple[MediaSpan, ...] = ()
    """The images among its tokens."""
    experts: Experts | None = None
    """[T, routers, k] those that the sampler's routers chose, where it noted them: the last time it computed each."""

    policy: Ints = field(init=False, repr=False)
    """The places of the policy's tokens: where `loss_mask` is True."""

    def __post_init__(self) -> None:
        self.token_ids = np.asarray(self.token_ids, np.int64)
        self.loss_mask = np.asarray(self.loss_mask, np.bool_)
        self.logprobs = np.asarray(self.logprobs, np.float64)
        self.turns = np.asarray(self.turns, np.int32)
        versions = np.asarray(self.versions, np.int32)
        self.versions = versions if versions.ndim else np.full(len(self.token_ids), versions)
        arrays = self.token_ids, self.loss_mask, self.logprobs, self.turns, self.versions
        if len({len(array) for array in arrays}) > 1:
            raise ValueError("token ids, loss mask, logprobs, turns and versions differ in length")
        self.policy = np.flatnonzero(self.loss_mask)
        self.check()

    def check(self) -> None:
        """Raise when an array written later does not fit the tokens."""
        for name in OPTIONAL:
            values: Floats | None = getattr(self, name)
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(
                    f"{name} of trajectory {self.trajectory} has {len(values)} entries for {len(self.token_ids)} tokens"
                )

    @property
    def policy_tokens(self) -> int:
        """How many tokens the policy wrote."""
        return len(self.policy)

    @property
    def policy_version(self) -> int:
        """The oldest version that wrote any of its policy tokens."""
        return int(self.gather("versions").min())

    def gather(self, name: str) -> NDArray[Any]:
        """The entries of one array at the policy's tokens; an array nobody has written raises."""
        values: NDArray[Any] | None = getattr(self, name)
        if values is None:
            raise ValueError(f"trajectory {self.trajectory} has no {name}")
        if len(values) != len(self.token_ids):
            self.check()
        entries: NDArray[Any] = values[self.policy]
        return entries

    def write(self, name: str, values: ArrayLike) -> None:
        """Lay one value per policy token out over all tokens, zero elsewhere, as the array of this name."""
        if name not in OPTIONAL:
            raise ValueError(f"{name!r} is not an array that is written later")
        column = np.asarray(values, np.float64)
        if column.shape != (self.policy_tokens,):
            raise ValueError(f"{column.shape} {name} for {self.policy_tokens} policy tokens")
        spread = np.zeros(len(self.token_ids))
        spread[self.policy] = column
        setattr(self, name, spread)


def to_sequences(source: Iterable[Trajectory | Group]) -> list[TrainSequence]:
    """One sequence per ledger segment that holds policy tokens; tokens are taken as recorded, never rebuilt.

    Branches that are not trained are left aside altogether.

    From groups, every trajectory without a failure belongs to its group and must have a reward. Failures, and
    trajectories given without a group, are LEFT_OUT.
    """
    return [
        TrainSequence(
            token_ids=ledger.token_ids,
            loss_mask=mask,
            logprobs=ledger.logprobs.astype(np.float64),
            turns=ledger.turns,
            versions=ledger.versions,
            trajectory=number,
            group=group,
            reward=math.nan if trajectory.reward is None else trajectory.reward,
            # As with the parts of a reward, several scores of one turn are added.
            turn_scores={turn.index: sum(turn.scores.values()) for turn in _trained_turns(trajectory) if turn.scores},
            segment=segment,
            branch=branch,
            reused=trajectory.reused_from is not None,
            media=ledger.media,
            experts=_experts(trajectory, segment, len(ledger)),
        )
        for number, (group, trajectory) in enumerate(_numbered(source))
        for segment, branch in _trained_segments(trajectory)
        if (mask := (ledger := trajectory.segments[segment]).loss_mask).any()
    ]


def _experts(trajectory: Trajectory, segment: int, length: int) -> Experts | None:
    """What each turn has noted, over what earlier ones had: a token that was computed anew was seen so by those that
    come after."""
    noted = None
    for turn in trajectory.every_turn:
        if turn.segment == segment and turn.experts is not None:
            noted = not_noted(length, turn.experts) if noted is None else noted
            end = turn.start + turn.completion_tokens - 1
            noted[end - len(turn.experts) : end] = turn.experts
    return noted


def _trained_segments(trajectory: Trajectory) -> Iterable[tuple[int, int]]:
    """Its ledgers that may be learnt from, each with the number of its conversation."""
    if not trajectory.branches:
        return ((segment, 0) for segment in range(len(trajectory.segments)))
    owners = dict.fromkeys(range(len(trajectory.segments)), 0)
    for number, branch in enumerate(trajectory.branches, start=1):
        owners |= dict.fromkeys((turn.segment for turn in branch.turns), number)
    return (
        (segment, owner) for segment, owner in owners.items() if not owner or trajectory.branches[owner - 1].trained
    )


def _trained_turns(trajectory: Trajectory) -> list[Turn]:
    return [*trajectory.turns, *(turn for branch in trajectory.branches if branch.trained for turn in branch.turns)]


def _numbered(source: Iterable[Trajectory | Group]) -> Iterator[tuple[int, Trajectory]]:
    """Every trajectory with the group it counts for."""
    for number, entry in enumerate(source):
        if isinstance(entry, Trajectory):
            yield LEFT_OUT, entry
            continue
        for trajectory in entry.trajectories:
            if trajectory.failure is None and trajectory.reward is None:
                raise DataError(f"sample {trajectory.sample.id}, sibling {trajectory.sibling} has not been scored")
            yield (number if trajectory.failure is None else LEFT_OUT), trajectory


def write_back(sequences: Sequence[TrainSequence], trajectories: Sequence[Trajectory]) -> None:
    """Write what training computed into the trajectories and ledgers that the sequences were made of."""
    advantages: dict[int, list[Floats]] = {}
    for sequence in sequences:
        advantages.setdefault(sequence.trajectory, []).append(sequence.gather("advantages"))
    for number, rows in advantages.items():
        trajectories[number].advantage = float(np.concatenate(rows).mean())
    for sequence in trainable(sequences):
        penalties = sequence.kl_penalties
        trajectories[sequence.trajectory].segments[sequence.segment].training = TokenTrainingData(
            logprobs=_recorded(sequence.first_logprobs),
            new_logprobs=_recorded(sequence.new_logprobs),
            ref_logprobs=_recorded(sequence.ref_logprobs),
            entropies=_recorded(sequence.entropies),
            values=_recorded(sequence.values),
            advantages=_recorded(sequence.advantages),
            rewards=_recorded(None if penalties is None else -penalties),
        )


def _recorded(values: Floats | None) -> NDArray[np.float32] | None:
    return None if values is None else values.astype(np.float32)


def trainable(sequences: Iterable[TrainSequence]) -> list[TrainSequence]:
    """Without those left out: a failure of the infrastructure teaches nothing."""
    return [sequence for sequence in sequences if sequence.group != LEFT_OUT]

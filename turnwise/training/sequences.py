"""Trajectories to flat training sequences: the recorded tokens with a mask over exactly the policy's."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

from turnwise.errors import DataError
from turnwise.types import Group, TokenTrainingData, Trajectory

LEFT_OUT = -1
"""The group of a sequence that belongs to no baseline: its trajectory failed, or came without a group."""
OPTIONAL = (
    "old_logprobs", "first_logprobs", "ref_logprobs", "values", "kl_penalties", "advantages", "returns", "weights",
    "new_logprobs", "entropies",
)  # fmt: skip
"""The arrays that are written later; None before."""


@dataclass(slots=True)
class TrainSequence:
    """One ledger segment on its way to the gradient. Every list is as long as `token_ids`, zero off the mask.

    `TrainSequence([5, 6, 9], [False, False, True], [0.0, 0.0, -0.3], [0, 0, 0], 0, trajectory=0, group=0, reward=1.0)`.
    A field that starts None names its single writer; write with `scatter`, which raises on the wrong length.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    """True exactly at the policy's tokens."""
    logprobs: list[float]
    """The sampler's."""
    turns: list[int]
    policy_version: int
    """The oldest version that wrote any of its policy tokens; -1 when no turn tells."""
    trajectory: int
    """Index into the step's trajectories; the segments of one trajectory share it and keep their order."""
    group: int
    """Index of the group; LEFT_OUT when the trajectory has no part in a baseline and is not trained by reward."""
    reward: float
    """The trajectory's; nan when nothing scored it."""
    turn_scores: dict[int, float] = field(default_factory=dict)
    """What scoring thought of the trajectory's turns, its other segments' included; the others were not scored."""
    old_logprobs: list[float] | None = None
    """Written by optimise: what the ratio is taken against, the sampler's or the learner's before the first update."""
    first_logprobs: list[float] | None = None
    """Written by optimise: the learner's before the first update of this step, where it computed them."""
    ref_logprobs: list[float] | None = None
    """Written by optimise when a reference is used."""
    values: list[float] | None = None
    """Written by optimise when a critic is used."""
    kl_penalties: list[float] | None = None
    """Written by kl.penalise when KL is part of the reward: subtracted from it, token by token."""
    advantages: list[float] | None = None
    """Written by advantages.assign."""
    returns: list[float] | None = None
    """Written by advantages.assign where the estimator has token-level returns."""
    weights: list[float] | None = None
    """Written by importance.correct: multiplies the policy loss, 0 rejects a token."""
    new_logprobs: list[float] | None = None
    """Written by optimise: the learner's in the last update that used the sequence."""
    entropies: list[float] | None = None
    """Written by optimise, with them."""
    segment: int = 0
    """Which of the trajectory's ledgers this is."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.loss_mask) == len(self.logprobs) == len(self.turns):
            raise ValueError("token ids, loss mask, logprobs and turns differ in length")
        self.check()

    def check(self) -> None:
        """Raise when an array written later does not fit the tokens."""
        for name in OPTIONAL:
            values: list[float] | None = getattr(self, name)
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(
                    f"{name} of trajectory {self.trajectory} has {len(values)} entries for {len(self.token_ids)} tokens"
                )

    @property
    def policy_tokens(self) -> int:
        """How many tokens the policy wrote."""
        return sum(self.loss_mask)

    def gather(self, name: str) -> list[float]:
        """The entries of one array at the policy's tokens; an array nobody has written raises."""
        values: list[float] | None = getattr(self, name)
        if values is None:
            raise ValueError(f"trajectory {self.trajectory} has no {name}")
        if len(values) != len(self.token_ids):
            self.check()
        return list(compress(values, self.loss_mask))

    def scatter(self, values: Sequence[float]) -> list[float]:
        """One value per policy token laid out over all tokens, zero elsewhere: the way to write an array."""
        if len(values) != self.policy_tokens:
            raise ValueError(f"{len(values)} values for {self.policy_tokens} policy tokens")
        following = iter(values)
        return [float(next(following)) if flag else 0.0 for flag in self.loss_mask]


def to_sequences(source: Iterable[Trajectory | Group]) -> list[TrainSequence]:
    """One sequence per ledger segment that holds policy tokens; tokens are taken as recorded, never rebuilt.

    From groups, every trajectory without a failure belongs to its group and must have a reward. Failures, and
    trajectories given without a group, are LEFT_OUT.
    """
    return [
        TrainSequence(
            token_ids=list(ledger.token_ids),
            loss_mask=ledger.loss_mask,
            logprobs=list(ledger.logprobs),
            turns=list(ledger.turns),
            policy_version=min((t.policy_version for t in trajectory.turns if t.segment == segment), default=-1),
            trajectory=number,
            group=group,
            reward=math.nan if trajectory.reward is None else trajectory.reward,
            # As with the parts of a reward, several scores of one turn are added.
            turn_scores={turn.index: sum(turn.scores.values()) for turn in trajectory.turns if turn.scores},
            segment=segment,
        )
        for number, (group, trajectory) in enumerate(_numbered(source))
        for segment, ledger in enumerate(trajectory.segments)
        if any(ledger.loss_mask)
    ]


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
    advantages: dict[int, list[float]] = {}
    for sequence in sequences:
        advantages.setdefault(sequence.trajectory, []).extend(sequence.gather("advantages"))
    for number, row in advantages.items():
        trajectories[number].advantage = sum(row) / len(row)
    for sequence in trainable(sequences):
        penalties = sequence.kl_penalties
        trajectories[sequence.trajectory].segments[sequence.segment].training = TokenTrainingData(
            logprobs=sequence.first_logprobs,
            new_logprobs=sequence.new_logprobs,
            ref_logprobs=sequence.ref_logprobs,
            entropies=sequence.entropies,
            values=sequence.values,
            advantages=sequence.advantages,
            rewards=None if penalties is None else [-penalty for penalty in penalties],
        )


def trainable(sequences: Iterable[TrainSequence]) -> list[TrainSequence]:
    """Without those left out: a failure of the infrastructure teaches nothing."""
    return [sequence for sequence in sequences if sequence.group != LEFT_OUT]


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

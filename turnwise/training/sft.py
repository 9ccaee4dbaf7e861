"""Supervised fine-tuning: trajectories in shuffled batches of tokens, each an update of the learner on the policy's."""

import hashlib
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from turnwise.config import LearnerConfig, SftConfig
from turnwise.config.choices import Decay
from turnwise.engines.learners.learner import SUPERVISED, Learner, NotFinite, Who
from turnwise.errors import DataError, TurnwiseError
from turnwise.training.packing import fill, pack, tokens_by_trajectory
from turnwise.training.sequences import LEFT_OUT, TrainSequence, to_sequences
from turnwise.types import Trajectory

PASSES = 3
"""How often the trajectories are gone through when nobody says how many updates there shall be."""
BETA2, WEIGHT_DECAY = 0.98, 0.01
LAST_LR = 0.1
"""The share of the learning rate at which its cosine decay ends."""


@dataclass(frozen=True, slots=True)
class SftStep:
    """The numbers of one weight update."""

    loss: float
    lr: float
    grad_norm: float
    """Before it is clipped."""
    tokens: int
    """Of the batch."""
    policy_tokens: int
    """Among them, those that were learned."""
    seconds: float
    measured: Mapping[str, float] = field(default_factory=dict)
    """Numbers of a lesson's own, under the names that metrics.jsonl has."""

    def metrics(self) -> dict[str, float]:
        """The numbers under the names that metrics.jsonl has."""
        return {
            "sft/loss": self.loss,
            "sft/lr": self.lr,
            "sft/grad_norm": self.grad_norm,
            "sft/policy_tokens": self.policy_tokens,
            "perf/total_num_tokens": self.tokens,
            "perf/throughput": self.tokens / self.seconds,
            "timing_s/step": self.seconds,
            **self.measured,
        }


class Lesson(Protocol):
    """What a fine-tuning makes of its trajectories; an extension may bring another than to imitate them."""

    def sequences(self, trajectories: Sequence[Trajectory]) -> list[TrainSequence]:
        """What is learned from; sequences of one group stay in one batch."""

    def prepare(self, learner: Learner, sequences: Sequence[TrainSequence], token_budget: int | None) -> None:
        """Called with the learner as it starts, before any step of the run."""

    def learn(self, learner: Learner, batch: Sequence[TrainSequence], token_budget: int | None) -> SftStep:
        """One update."""


class Imitation:
    """Every token of the policy's is made more likely."""

    def sequences(self, trajectories: Sequence[Trajectory]) -> list[TrainSequence]:
        return to_sequences(trajectories)

    def prepare(self, learner: Learner, sequences: Sequence[TrainSequence], token_budget: int | None) -> None:
        """Nothing is asked of the start."""

    def learn(self, learner: Learner, batch: Sequence[TrainSequence], token_budget: int | None) -> SftStep:
        return learn(learner, batch, token_budget)


def learner_config(learner: LearnerConfig, sft: SftConfig) -> LearnerConfig:
    """The learner of a fine-tuning: its own learning rate and decay, all else as configured."""
    return replace(
        learner, lr=sft.lr, warmup=sft.warmup, decay=Decay.cosine, min_lr_ratio=LAST_LR, beta2=BETA2,
        weight_decay=WEIGHT_DECAY,
    )  # fmt: skip


def check_sequences(sequences: Sequence[TrainSequence]) -> None:
    """Refuse what nothing can be learned from."""
    if not sequences:
        raise DataError("no sequence with policy tokens to train on")
    if any(sequence.loss_mask[0] for sequence in sequences):
        raise DataError("a sequence starts with a policy token: there is nothing to predict it from")


def fingerprint(sequences: Sequence[TrainSequence]) -> str:
    """A short digest of the tokens to learn from and their context, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for sequence in sequences:
        digest.update(f"{len(sequence.token_ids)} ".encode())
        digest.update(sequence.token_ids.tobytes() + sequence.loss_mask.tobytes())
    return digest.hexdigest()


def count_updates(sequences: list[TrainSequence], config: SftConfig, seed: int) -> int:
    """How many updates there will be: `sft.steps`, or as many as PASSES over the sequences take."""
    if config.steps is not None:
        return config.steps
    return sum(len(list(_one_pass(sequences, config.batch_tokens, seed, epoch))) for epoch in range(PASSES))


def shuffled(sequences: list[TrainSequence], batch_tokens: int, seed: int) -> Iterator[list[TrainSequence]]:
    """Batches without end, shuffled anew for each pass; a function of the sequences and the seed alone."""
    for epoch in itertools.count():
        yield from _one_pass(sequences, batch_tokens, seed, epoch)


def _one_pass(sequences: list[TrainSequence], budget: int, seed: int, epoch: int) -> Iterator[list[TrainSequence]]:
    """As few batches as the budget allows, filled evenly: a small rest would move the weights as a full one does."""
    units: dict[tuple[int, int], list[TrainSequence]] = {}
    for number, sequence in enumerate(sequences):
        units.setdefault((sequence.group, number if sequence.group == LEFT_OUT else 0), []).append(sequence)
    order = list(units.values())
    random.Random(f"{seed}/{epoch}").shuffle(order)
    lengths = [sum(len(sequence.token_ids) for sequence in unit) for unit in order]
    even = _even_budget(lengths, budget)
    batch: list[TrainSequence] = []
    size = 0
    for unit, length in zip(order, lengths, strict=True):
        if batch and size + length > even:
            yield batch
            batch, size = [], 0
        batch, size = [*batch, *unit], size + length
    if batch:
        yield batch


def _even_budget(lengths: Sequence[int], budget: int) -> int:
    """The smallest budget that takes no more batches than this one."""
    fewest, low, high = _count_batches(lengths, budget), max(lengths, default=0), budget
    while low < high:
        middle = (low + high) // 2
        if _count_batches(lengths, middle) > fewest:
            low = middle + 1
        else:
            high = middle
    return high


def _count_batches(lengths: Sequence[int], budget: int) -> int:
    count, size = 0, budget
    for length in lengths:
        if size + length > budget:
            count, size = count + 1, 0
        size += length
    return count


def heldout_loss(learner: Learner, sequences: Sequence[TrainSequence], token_budget: int | None) -> float:
    """The mean loss of the policy's tokens in sequences that are not learned."""
    whole = tokens_by_trajectory(sequences)
    parts = fill(sequences, token_budget or learner.token_budget)
    scores = [learner.score(pack(part, whole), Who.POLICY) for part in parts]
    return -sum(float(part.sum()) for part in scores) / sum(len(part) for part in scores)


def learn(learner: Learner, batch: Sequence[TrainSequence], token_budget: int | None) -> SftStep:
    """One update by the mean over the batch's policy tokens, worked off in parts of at most `token_budget` tokens.

    Without a budget, in parts that the learner has room for.
    """
    started, whole = time.perf_counter(), tokens_by_trajectory(batch)
    try:
        parts = fill(batch, token_budget or learner.token_budget)
        done = learner.update([pack(part, whole) for part in parts], SUPERVISED)
    except NotFinite as error:
        raise TurnwiseError(f"{error}; lower sft.lr") from error
    metrics, tokens = done.metrics, sum(len(sequence.token_ids) for sequence in batch)
    seconds = time.perf_counter() - started
    return SftStep(metrics["loss"], metrics["lr"], metrics["grad_norm"], tokens, sum(whole.values()), seconds)

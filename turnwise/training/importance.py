"""The gap between the sampler that wrote the tokens and the learner that trains on them: measured, and corrected.

ratio = learner probability / sampler probability of the token that was written, before the step's first update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.config.choices import Correction, Excess
from turnwise.engines.learners.kl_estimates import LOG_RATIO_LIMIT
from turnwise.errors import ConfigError
from turnwise.training.packing import gather, write
from turnwise.training.sequences import Floats, Ints, TrainSequence


@dataclass(frozen=True, slots=True)
class ImportanceCorrection:
    """How `correct` turns importance ratios into weights: level, limits, and what happens beyond them."""

    level: Correction = Correction.token
    excess: Excess = Excess.truncate
    upper: float = 2.0
    lower: float | None = None
    """Only `reject` has a lower threshold; None is 1 / upper."""

    def __post_init__(self) -> None:
        if self.upper < 1:
            raise ConfigError(f"the upper threshold of importance weights must be at least 1, not {self.upper}")
        if self.lower is not None and self.excess is Excess.truncate:
            raise ConfigError("a lower threshold of importance weights is for reject; truncate bounds from above only")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"the lower threshold of importance weights must lie between 0 and 1, not {self.floor}")

    @property
    def floor(self) -> float:
        """The lower threshold in force."""
        return 1.0 / self.upper if self.lower is None else self.lower


@dataclass(frozen=True, slots=True)
class Gap:
    """The logprobs of learner and sampler at all policy tokens, with turn and trajectory of each.

    A trajectory counts once, however many sequences hold it.
    """

    learner: Floats
    sampler: Floats
    turns: Ints
    trajectory: Ints
    counts: Ints
    """Policy tokens of each trajectory."""

    @property
    def log_ratio(self) -> Floats:
        """log of learner / sampler per token."""
        return self.learner - self.sampler

    def sums(self, values: Floats) -> Floats:
        """The sum over each trajectory."""
        return np.bincount(self.trajectory, weights=values, minlength=len(self.counts)).astype(np.float64)

    def means(self, values: Floats) -> Floats:
        """The mean over each trajectory."""
        means: Floats = self.sums(values) / self.counts
        return means


def gap(sequences: Sequence[TrainSequence], learner: str = "old_logprobs") -> Gap:
    """Collect what learner and sampler say about the policy's tokens; `learner` names the array that it wrote."""
    sizes = [sequence.policy_tokens for sequence in sequences]
    if not sizes or not all(sizes):
        raise ValueError("the sampler and the learner can only be compared on sequences with policy tokens")

    _, owner = np.unique([sequence.trajectory for sequence in sequences], return_inverse=True)
    trajectory = np.repeat(owner, sizes)
    ours, theirs, turns = (gather(sequences, name) for name in (learner, "logprobs", "turns"))
    return Gap(ours, theirs, turns, trajectory, np.bincount(trajectory))


def ratios(gaps: Gap, level: Correction) -> Floats:
    """The importance ratio of every policy token at this level, its logarithm bounded."""
    match level:
        case Correction.none:
            logs = np.zeros_like(gaps.log_ratio)
        case Correction.token:
            logs = gaps.log_ratio
        case Correction.sequence:
            logs = gaps.sums(gaps.log_ratio)[gaps.trajectory]
        case Correction.geometric:
            logs = gaps.means(gaps.log_ratio)[gaps.trajectory]
    return _exp(logs)


def _exp(logs: Floats) -> Floats:
    """exp that stays finite, whatever the logarithms are."""
    return np.exp(np.clip(logs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def weigh(ratio: Floats, correction: ImportanceCorrection) -> Floats:
    """The weights that a correction makes of importance ratios: truncated or rejected."""
    match correction.excess:
        case Excess.truncate:
            return np.minimum(ratio, correction.upper)
        case Excess.reject:
            inside = (ratio >= correction.floor) & (ratio <= correction.upper)
            return np.where(inside, ratio, 0.0)


def correct(sequences: Sequence[TrainSequence], correction: ImportanceCorrection) -> dict[str, float]:
    """Write `weights` into the sequences; returns metrics of the weights (those of the gap: `mismatch`)."""
    gaps = gap(sequences)
    ratio = ratios(gaps, correction.level)
    weights = weigh(ratio, correction)
    write(sequences, "weights", weights)
    bounded = np.clip(ratio, correction.floor, correction.upper)
    metrics = {
        "rollout_is_mean": ratio.mean(),
        "rollout_is_max": ratio.max(),
        "rollout_is_min": ratio.min(),
        "rollout_is_std": bounded.std(),
        "rollout_is_eff_sample_size": bounded.mean() ** 2 / (bounded**2).mean(),
        "rollout_is_ratio_fraction_high": (ratio > correction.upper).mean(),
        "rollout_is_ratio_fraction_low": (ratio < correction.floor).mean(),
    }
    if correction.excess is Excess.reject:
        rejected = (weights == 0.0).astype(np.float64)
        metrics["rollout_rs_masked_fraction"] = rejected.mean()
        metrics["rollout_rs_seq_masked_fraction"] = (gaps.sums(rejected) > 0).mean()
    return {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


def mismatch(sequences: Sequence[TrainSequence], learner: str = "old_logprobs") -> dict[str, float]:
    """How far learner and sampler are apart, over all policy tokens and by turn; finite whatever they say.

    `abs_diff` is |learner logprob - sampler logprob|, and
    `turn_2/abs_diff_max` the largest in the third assistant turn of any trajectory.
    """
    gaps = gap(sequences, learner)
    logs = gaps.log_ratio
    bounded = np.clip(logs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ours, theirs = gaps.means(gaps.learner), gaps.means(gaps.sampler)
    summed = np.clip(gaps.sums(logs), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    distance = np.abs(logs)
    metrics = {
        "kl": -logs.mean(),
        "k3_kl": (np.expm1(bounded) - bounded).mean(),
        "training_ppl": _exp(-ours).mean(),
        "training_log_ppl": -ours.mean(),
        "rollout_ppl": _exp(-theirs).mean(),
        "rollout_log_ppl": -theirs.mean(),
        "log_ppl_diff": (theirs - ours).mean(),
        "log_ppl_diff_max": (theirs - ours).max(),
        "log_ppl_diff_min": (theirs - ours).min(),
        "log_ppl_abs_diff": np.abs(theirs - ours).mean(),
        "ppl_ratio": _exp(theirs - ours).mean(),
        "chi2_token": np.exp(2 * bounded).mean() - 1,
        "chi2_seq": np.exp(2 * summed).mean() - 1,
        "abs_diff_mean": distance.mean(),
        "abs_diff_p99": np.quantile(distance, 0.99),
        "abs_diff_max": distance.max(),
    }
    for turn in np.unique(gaps.turns).tolist():
        here = distance[gaps.turns == turn]
        metrics[f"turn_{turn}/abs_diff_mean"] = here.mean()
        metrics[f"turn_{turn}/abs_diff_max"] = here.max()
    named = {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}
    return named | _probabilities(gaps)


def _probabilities(gaps: Gap) -> dict[str, float]:
    """`training/rollout_*`: probabilities, not logprobs; no correlation where one side does not vary."""
    learner, sampler = np.exp(gaps.learner), np.exp(gaps.sampler)
    difference = np.abs(learner - sampler)
    metrics = {
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_std": float(difference.std(ddof=1)) if len(difference) > 1 else 0.0,
    }
    spread = math.sqrt(float(learner.var() * sampler.var()))
    if spread > 0:
        covariance = float(((learner - learner.mean()) * (sampler - sampler.mean())).mean())
        metrics["training/rollout_actor_probs_pearson_corr"] = covariance / spread
    return metrics

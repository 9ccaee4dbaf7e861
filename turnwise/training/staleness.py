"""Episodes that older weights wrote: how old the trained tokens are, and what corrects for it where nobody chose."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.config import AlgorithmConfig, Config
from turnwise.config.choices import Correction, OldLogprobs, PolicyLoss
from turnwise.errors import ConfigError
from turnwise.training.packing import gather
from turnwise.training.sequences import TrainSequence

MOST_AGES = 16
"""Ages with a share of their own; what is older shares the last."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """What is done about tokens of older weights: `Treatment(OldLogprobs.learner, Correction.token, "...")`."""

    old_logprobs: OldLogprobs
    correction: Correction
    why: str


def oldest_allowed(config: Config) -> int:
    """How many steps old a trained token may be."""
    training = config.training
    return training.max_lag + (training.replay_age if training.replay_groups else 0)


def treatment(config: Config) -> Treatment:
    """The choices in force: those of the config, and where it leaves them open, those that its staleness asks for.

    A ratio to the sampler's log-probs is a correction by itself, and ppo_clip bounds it: a stale token that has moved
    far enough is not pushed further. With those log-probs no weight is added, and ppo_clip takes them by itself: beside
    the learner's, with a weight for every token, stale episodes push in full again and again (docs/experiments.md).
    """
    algorithm, old = config.algorithm, oldest_allowed(config)
    correction, logprobs = algorithm.correction, algorithm.old_logprobs
    why = "as set"
    if correction is None:
        clipped = logprobs is None and algorithm.loss == PolicyLoss.ppo_clip
        needed = old > 0 and not clipped and logprobs is not OldLogprobs.sampler
        correction = Correction.token if needed else Correction.none
        if old == 0:
            why = "every token comes from the newest weights"
        else:
            why = f"tokens are at most {old} {'step' if old == 1 else 'steps'} old"
            why += "" if needed else ", and a ratio to the log-probs they were drawn with corrects for that"
    if logprobs is None:
        logprobs = OldLogprobs.sampler if correction is Correction.none else OldLogprobs.learner
    return Treatment(logprobs, correction, why)


def unbounded(config: Config) -> str | None:
    """What is wrong with stale episodes that nothing weighs and no clip bounds; None where that is not so."""
    chosen, old = treatment(config), oldest_allowed(config)
    if old == 0 or chosen.correction is not Correction.none:
        return None
    if chosen.old_logprobs is OldLogprobs.learner:  # no ratio to the sampler, so no clip and no weight
        reason = "old log-probs are the learner's"
    elif config.algorithm.loss == PolicyLoss.reinforce:
        reason = "reinforce has no ratio"
    else:
        return None
    return (
        f"episodes may be {old} step(s) old and {reason}: nothing limits the effect of a stale episode, and such a "
        "run can collapse; set algorithm.old_logprobs=learner algorithm.correction=token"
    )


def check_correction(config: Config) -> None:
    """Refuse options of a correction that this config leaves out."""
    if config.algorithm.correction is not None or treatment(config).correction is not Correction.none:
        return
    for name in ("correction_mode", "correction_threshold"):
        if (value := getattr(config.algorithm, name)) != getattr(AlgorithmConfig, name):
            raise ConfigError(
                f"algorithm.{name}={getattr(value, 'value', value)} has no effect: nothing is corrected here "
                f"({treatment(config).why}); set algorithm.old_logprobs=learner and algorithm.correction=token"
            )


def measure(sequences: Sequence[TrainSequence], version: int, expected: int = 0) -> dict[str, float]:
    """How old the trained tokens are, in steps: mean, range, and the share of every age up to the `expected` one.

    `version` is that of the weights about to be updated.
    """
    if not sequences:
        return {}
    ages = np.maximum(version - gather(sequences, "versions").astype(np.int64), 0)
    metrics = {"mean": ages.mean(), "max": ages.max(), "min": ages.min()}
    last = min(max(expected, int(ages.max())), MOST_AGES)
    if last:
        shares = np.bincount(np.minimum(ages, last), minlength=last + 1) / len(ages)
        names = [f"age_{age}" for age in range(last + 1)]
        if last == MOST_AGES:
            names[-1] += "_up"
        metrics |= dict(zip(names, shares, strict=True))
    return {f"staleness/{name}": float(value) for name, value in metrics.items()}

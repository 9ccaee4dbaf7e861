"""How far the policy is from its reference, as a penalty in the reward, and the penalty's coefficient."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from turnwise.config.choices import KLEstimator
from turnwise.engines.learners.kl_estimates import estimate
from turnwise.errors import ConfigError
from turnwise.training.sequences import Floats, TrainSequence

HORIZON = 10_000
"""Trajectories over which a steered coefficient may change by a fifth."""
FIXED, ADAPTIVE = "fixed", "adaptive"
"""Kinds of controller, as checkpoints name them."""


@dataclass(frozen=True, slots=True)
class KLMeasure:
    """What `penalise` found: the KL a controller is updated with, and how many trajectories it was measured on."""

    kl: float
    """Mean over trajectories of the mean over a trajectory's policy tokens."""
    trajectories: int
    coefficient: float

    def metrics(self) -> dict[str, float]:
        """The KL metrics of a step and the coefficient that they led to."""
        return {"actor/reward_kl_penalty": self.kl, "actor/reward_kl_penalty_coeff": self.coefficient}


def penalise(sequences: Sequence[TrainSequence], estimator: KLEstimator, coefficient: float) -> KLMeasure:
    """Write coefficient * KL into `kl_penalties` at every policy token, measured before the step's first update."""
    if not sequences:
        raise ValueError("no sequence to measure KL on")
    by_trajectory: dict[int, list[Floats]] = {}
    for sequence in sequences:
        if sequence.ref_logprobs is None:
            raise ConfigError("KL in the reward needs a reference policy: the sequences have no ref_logprobs")
        old, reference = (torch.from_numpy(sequence.gather(name)) for name in ("old_logprobs", "ref_logprobs"))
        kl: Floats = estimate(old, reference, estimator).numpy()
        sequence.write("kl_penalties", coefficient * kl)
        by_trajectory.setdefault(sequence.trajectory, []).append(kl)
    means = [float(np.concatenate(rows).mean()) for rows in by_trajectory.values()]
    return KLMeasure(math.fsum(means) / len(means), len(means), coefficient)


class KLController(Protocol):
    """Holds the coefficient of the KL in the reward; its state is part of a checkpoint."""

    value: float

    def update(self, kl: float, n: int) -> None:
        """Take in the KL measured on n trajectories."""

    def state(self) -> dict[str, str | float]:
        """What a checkpoint keeps of the controller."""

    def load(self, state: Mapping[str, str | float]) -> None:
        """Restores what `state` gave a checkpoint."""


class FixedKL:
    """A coefficient that stays what it is."""

    def __init__(self, value: float) -> None:
        self.value = _coefficient(value)

    def update(self, kl: float, n: int) -> None:
        """Does nothing: the coefficient is fixed."""

    def state(self) -> dict[str, str | float]:
        """The kind of controller and its coefficient."""
        return {"kind": FIXED, "value": self.value}

    def load(self, state: Mapping[str, str | float]) -> None:
        """Takes over the coefficient of a checkpoint."""
        self.value = _saved(state, FIXED)


class AdaptiveKL:
    """A proportional controller: `value *= 1 + clip(kl / target - 1, +-0.2) * n / horizon`."""

    def __init__(self, value: float, target: float, horizon: float) -> None:
        if target <= 0 or horizon <= 0:
            raise ConfigError(f"an adaptive KL needs a positive target and horizon, not {target} and {horizon}")
        self.value = _coefficient(value)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n: int) -> None:
        """One proportional step; n is the number of trajectories the KL was measured on."""
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL is {kl}")
        factor = 1.0 + min(0.2, max(-0.2, kl / self.target - 1.0)) * n / self.horizon
        if factor <= 0:
            raise ConfigError(f"a KL horizon of {self.horizon} is too short for {n} trajectories a step")
        self.value *= factor

    def state(self) -> dict[str, str | float]:
        """Kind and value; target and horizon belong to the config."""
        return {"kind": ADAPTIVE, "value": self.value}

    def load(self, state: Mapping[str, str | float]) -> None:
        """Takes over the coefficient of a checkpoint."""
        self.value = _saved(state, ADAPTIVE)


def controller(value: float, target: float | None) -> KLController:
    """A coefficient that stays what it is, or one that is steered to a target."""
    return FixedKL(value) if target is None else AdaptiveKL(value, target, HORIZON)


def _coefficient(value: float) -> float:
    if value < 0:
        raise ConfigError(f"a KL coefficient cannot be negative: {value}")
    return float(value)


def _saved(state: Mapping[str, str | float], kind: str) -> float:
    if state.get("kind") != kind:
        raise ConfigError(f"the checkpoint holds a {state.get('kind')} KL controller, the config asks for {kind}")
    return float(state["value"])

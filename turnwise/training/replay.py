"""The replay buffer: which recorded groups later steps train on again, bounded in number, age and uses."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.config import TrainingConfig
from turnwise.training.shaping import usable
from turnwise.types import Group

_STREAM = 0x5EA1  # sets the buffer's draws apart from whatever else the seed decides


@dataclass(slots=True)
class Kept:
    """A group of the buffer: rows of `trajectories/step_000003.parquet`, `Kept(step=3, first=8, rows=8, spread=0.5)`.

    The episodes themselves stay in the file, so that a checkpoint holds this and nothing else.
    """

    step: int
    """The step that trained on it first."""
    first: int
    rows: int
    spread: float
    """The standard deviation of its rewards."""
    uses: int = 0
    """How often it was trained on again."""
    baseline: float | None = None
    """remax: the reward of its greedy rollout."""

    def __post_init__(self) -> None:
        numbers = (self.spread, *(() if self.baseline is None else (self.baseline,)))
        if self.step < 1 or self.first < 0 or self.rows < 1 or self.uses < 0 or not all(map(math.isfinite, numbers)):
            raise ValueError(f"no group of a replay buffer: {self}")


def replayed_per_step(training: TrainingConfig) -> int:
    """Groups of the buffer that make `replay_share` of a step, beside its `groups` new ones; at least one."""
    if not training.replay_groups:
        return 0
    return max(1, round(training.groups * training.replay_share / (1 - training.replay_share)))


def candidates(groups: Iterable[Group], step: int, baselines: dict[int, float | None]) -> list[Kept]:
    """The groups of a step, recorded one after the other, as the buffer names them.

    Without those that taught nothing: all failed, or all with the same reward.
    """
    found: list[Kept] = []
    first = 0
    for number, group in enumerate(groups):
        rewards = [trajectory.reward for trajectory in usable(group)]
        spread = float(np.std(np.array(rewards, dtype=np.float64))) if rewards else 0.0
        if spread > 0:
            found.append(Kept(step, first, len(group.trajectories), spread, baseline=baselines.get(number)))
        first += len(group.trajectories)
    return found


def choose(kept: Sequence[Kept], step: int, training: TrainingConfig, seed: int) -> list[Kept]:
    """Those that this step trains on again: drawn without preference among all that may be, the same for a seed."""
    able = [one for one in kept if _may_be_used(one, step, training)]
    count = min(replayed_per_step(training), len(able))
    if not count:
        return []
    places = np.random.default_rng([_STREAM, seed % 2**64, step]).permutation(len(able))[:count]
    return [able[place] for place in sorted(places.tolist())]


def renew(
    kept: Sequence[Kept], used: Sequence[Kept], new: Sequence[Kept], step: int, training: TrainingConfig
) -> list[Kept]:
    """The buffer after a step: what it used counted, its own groups added, the rest bounded.

    What is too old for the next step or used up is forgotten. Of the others those whose rewards differ most stay, and
    of equals the newer. Nothing given is changed: a step that fails leaves the buffer as it was.
    """
    again = {(one.step, one.first) for one in used}
    counted = [_with_use(one) if (one.step, one.first) in again else one for one in kept]
    able = [one for one in (*counted, *new) if _may_be_used(one, step + 1, training)]
    best = sorted(able, key=lambda one: (-one.spread, -one.step, one.first))[: training.replay_groups]
    return sorted(best, key=lambda one: (one.step, one.first))


def _may_be_used(one: Kept, step: int, training: TrainingConfig) -> bool:
    return one.uses < training.replay_uses and step - one.step <= training.replay_age


def _with_use(one: Kept) -> Kept:
    return Kept(one.step, one.first, one.rows, one.spread, one.uses + 1, one.baseline)

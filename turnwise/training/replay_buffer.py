"""The replay buffer: which recorded groups later steps train on again, bounded in number, age and uses."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.config import TrainingConfig
from turnwise.rollout.collector import usable
from turnwise.types import Group

_STREAM = 0x5EA1  # sets the buffer's draws apart from whatever else the seed decides


@dataclass(slots=True)
class ReplayEntry:
    """A group of the replay buffer: rows of a file such as `trajectories/step_000003.parquet`. The episodes themselves
    stay in the file, so that a checkpoint holds this and nothing else."""

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


def candidates(groups: Iterable[Group], step: int, baselines: dict[int, float | None]) -> list[ReplayEntry]:
    """The groups of a step, recorded one after the other, as the buffer names them.

    Without those that taught nothing: all failed, or all with the same reward.
    """
    entries: list[ReplayEntry] = []
    first = 0
    for number, group in enumerate(groups):
        rewards = [trajectory.reward for trajectory in usable(group)]
        spread = float(np.std(np.array(rewards, dtype=np.float64))) if rewards else 0.0
        if spread > 0:
            entries.append(ReplayEntry(step, first, len(group.trajectories), spread, baseline=baselines.get(number)))
        first += len(group.trajectories)
    return entries


def choose(buffer: Sequence[ReplayEntry], step: int, training: TrainingConfig, seed: int) -> list[ReplayEntry]:
    """Those that this step trains on again: drawn without preference among all that may be, the same for a seed."""
    able = [entry for entry in buffer if _may_be_used(entry, step, training)]
    count = min(replayed_per_step(training), len(able))
    if not count:
        return []
    places = np.random.default_rng([_STREAM, seed % 2**64, step]).permutation(len(able))[:count]
    return [able[index] for index in sorted(places.tolist())]


def renew(
    buffer: Sequence[ReplayEntry],
    used: Sequence[ReplayEntry],
    new: Sequence[ReplayEntry],
    step: int,
    training: TrainingConfig,
) -> list[ReplayEntry]:
    """The buffer after a step: what it used counted, its own groups added, the rest bounded.

    What is too old for the next step or used up is forgotten. Of the others those whose rewards differ most stay, and
    of equals the newer. Nothing given is changed: a step that fails leaves the buffer as it was.
    """
    again = {(entry.step, entry.first) for entry in used}
    counted = [_with_use(entry) if (entry.step, entry.first) in again else entry for entry in buffer]
    able = [entry for entry in (*counted, *new) if _may_be_used(entry, step + 1, training)]
    best = sorted(able, key=lambda entry: (-entry.spread, -entry.step, entry.first))[: training.replay_groups]
    return sorted(best, key=lambda entry: (entry.step, entry.first))


def _may_be_used(entry: ReplayEntry, step: int, training: TrainingConfig) -> bool:
    return entry.uses < training.replay_uses and step - entry.step <= training.replay_age


def _with_use(entry: ReplayEntry) -> ReplayEntry:
    return ReplayEntry(entry.step, entry.first, entry.rows, entry.spread, entry.uses + 1, entry.baseline)

"""What a step trains on again: recorded groups of earlier steps, read back from the run's own files."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from turnwise.config import Config
from turnwise.errors import StorageError
from turnwise.storage.run_dir import RunDir, trajectory_file
from turnwise.storage.trajectories import read_rows
from turnwise.training.replay import Kept, choose
from turnwise.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Reused:
    """Groups of earlier steps, each with what the buffer knows of it; none where there is no buffer."""

    kept: list[Kept] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All of them, in order."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def baselines(self, first: int) -> dict[int, float | None]:
        """remax: their greedy rewards, by an index that goes on from that of the step's new groups."""
        return {number: one.baseline for number, one in enumerate(self.kept, start=first)}

    def metrics(self, step: int, buffer: list[Kept]) -> dict[str, float]:
        """How much was trained on again, how old it is, and what the buffer holds afterwards."""
        found = {"kept": len(buffer), "groups": len(self.groups), "trajectories": len(self.trajectories)}
        metrics = {f"replay/{name}": float(value) for name, value in found.items()}
        if self.kept:
            ages = np.array([step - one.step for one in self.kept])
            metrics |= {"replay/age/mean": float(ages.mean()), "replay/age/max": float(ages.max())}
            metrics["replay/age/min"] = float(ages.min())
        return metrics


def reuse(directory: RunDir, config: Config, kept: list[Kept], step: int) -> Reused:
    """The groups that this step trains on again, as their files have them; failed episodes are left aside."""
    chosen = choose(kept, step, config.training, config.seed)
    by_step: dict[int, list[Kept]] = {}
    for one in chosen:
        by_step.setdefault(one.step, []).append(one)
    groups = [group for recorded, some in by_step.items() for group in _read(directory, recorded, some)]
    return Reused(chosen, groups)  # `chosen` is in the order of steps too


def _read(directory: RunDir, step: int, some: list[Kept]) -> Iterator[Group]:
    path = directory.path / trajectory_file(step)
    try:
        read = iter(read_rows(path, [row for one in some for row in range(one.first, one.first + one.rows)]))
    except IndexError as error:
        raise StorageError(f"the replay buffer names trajectories that are not there: {error}") from error
    for one in some:
        whole = [next(read) for _ in range(one.rows)]
        if len({trajectory.sample.id for trajectory in whole}) != 1:
            raise StorageError(f"{path}, rows {one.first} to {one.first + one.rows - 1}: not one group, as was kept")
        usable = [trajectory for trajectory in whole if trajectory.failure is None]
        for trajectory in usable:
            trajectory.reused_from, trajectory.advantage = step, None
            for ledger in trajectory.segments:
                ledger.training = None  # of the step that trained on it first
        yield Group(whole[0].sample, usable)

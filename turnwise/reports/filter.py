"""Which samples are worth training on, by how often they were solved in recorded episodes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, DataError, StorageError
from turnwise.storage.run_dir import CONFIG, RunDir
from turnwise.types import Sample, Trajectory, is_right


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How a sample went: `tries` scored episodes, of which `right` were right."""

    sample: Sample
    tries: int
    right: int

    @property
    def accuracy(self) -> float | None:
        """None when no episode was scored."""
        return self.right / self.tries if self.tries else None


@dataclass(frozen=True, slots=True)
class Sieve:
    """What is kept: samples right in at least `least` and at most `most` of their tries."""

    least: float = 0.0
    most: float = 1.0
    min_tries: int = 1
    """Samples with fewer say too little about themselves and are kept."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most <= 1:
            raise ConfigError(
                f"the accuracy limits must be from 0 to 1, the lower one first, not {self.least:g} and {self.most:g}"
            )
        if self.min_tries < 1:
            raise ConfigError(f"the fewest tries must be at least 1, not {self.min_tries}")

    def sort(self, measured: Iterable[Difficulty]) -> "Sorted":
        """Every sample into its heap, in order."""
        fitting: list[Difficulty] = []
        too_easy: list[Difficulty] = []
        too_hard: list[Difficulty] = []
        unmeasured = 0
        for difficulty in measured:
            if difficulty.accuracy is None or difficulty.tries < self.min_tries:
                unmeasured += 1
                fitting.append(difficulty)
            elif difficulty.accuracy > self.most:
                too_easy.append(difficulty)
            elif difficulty.accuracy < self.least:
                too_hard.append(difficulty)
            else:
                fitting.append(difficulty)
        return Sorted(fitting, too_easy, too_hard, unmeasured)


@dataclass(frozen=True, slots=True)
class Sorted:
    """What a sieve made of the samples; `unmeasured` of those kept were tried too rarely to tell."""

    kept: list[Difficulty]
    too_easy: list[Difficulty]
    too_hard: list[Difficulty]
    unmeasured: int

    def as_json(self) -> dict[str, Any]:
        """How many samples are in each heap."""
        return {
            "kept": len(self.kept),
            "too_easy": len(self.too_easy),
            "too_hard": len(self.too_hard),
            "unmeasured": self.unmeasured,
        }


def measure(trajectories: Iterable[Trajectory]) -> list[Difficulty]:
    """The difficulty of every sample, in the order of their first episodes; failed episodes do not count as tries."""
    samples: dict[str, Sample] = {}
    tries: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        sample = trajectory.sample
        if samples.setdefault(sample.id, sample) != sample:
            raise DataError(f"two different samples have the id {sample.id!r}: the files are of different data")
        outcomes = tries.setdefault(sample.id, [])
        if trajectory.reward is not None:
            outcomes.append(is_right(trajectory.reward, trajectory.parts))
    return [Difficulty(samples[name], len(outcomes), sum(outcomes)) for name, outcomes in tries.items()]


def trajectory_files(places: Sequence[Path]) -> list[Path]:
    """The trajectory files behind runs and files. A training run gives its training episodes only.

    Its evaluations are of held-out samples, which must not find their way into a file to train on.
    """
    files: list[Path] = []
    for source in places:
        if source.is_dir() or not source.exists():
            run = RunDir.open(source)
            recorded = sorted(run.path.glob("trajectories/*.parquet")) or sorted(run.path.glob("eval/*.parquet"))
            if not recorded:
                raise StorageError(f"{run.path} holds no trajectories beside its {CONFIG}")
            files += recorded
        else:
            files.append(source)
    return files

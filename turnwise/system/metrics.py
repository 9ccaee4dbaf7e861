"""Numbers that carry their own reduction or their own uncertainty, so that no reader has to guess either."""

import enum
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


class Reduction(enum.StrEnum):
    """How many values of one name become one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Metric:
    """One observation: `Metric("num_turns", 3, Reduction.MEAN)`."""

    name: str
    value: float
    reduction: Reduction = Reduction.MEAN


def reduce(metrics: Iterable[Metric]) -> dict[str, float]:
    """Each name once, reduced its own way; one name with two reductions is a bug and raises."""
    values: dict[str, list[float]] = defaultdict(list)
    how: dict[str, Reduction] = {}
    for metric in metrics:
        if how.setdefault(metric.name, metric.reduction) is not metric.reduction:
            raise ValueError(f"metric {metric.name!r} is reduced by {how[metric.name]} and by {metric.reduction}")
        values[metric.name].append(float(metric.value))
    return {name: _reduce(numbers, how[name]) for name, numbers in values.items()}


def _reduce(values: list[float], how: Reduction) -> float:
    match how:
        case Reduction.MEAN:
            return sum(values) / len(values)
        case Reduction.SUM:
            return sum(values)
        case Reduction.MAX:
            return max(values)
        case Reduction.MIN:
            return min(values)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of episodes with its uncertainty: `Share(0.414, 0.044, n=128, samples=128)`."""

    value: float
    stderr: float
    """One standard error over samples, see `share`."""
    n: int
    """Episodes."""
    samples: int
    """Different samples among them."""

    def __str__(self) -> str:
        counts = f"n={self.n}" if self.n == self.samples else f"n={self.n}, {self.samples} samples"
        return f"{100 * self.value:.1f}% ± {100 * self.stderr:.1f} ({counts})"


def share(outcomes: Iterable[tuple[Hashable, float]], *, episodes_behind: int | None = None) -> Share | None:
    """The share of right outcomes, given as (sample, right), where right may be a chance of it; None of nothing.

    Where each outcome is a chance that was read from several episodes, `episodes_behind` is how many those are in all.

    Episodes of one sample are not independent, so the variance is that of a mean over clusters,

        v = K / (K - 1) * sum over the K samples of (right - value * episodes)^2 / n^2,

    which says how many independent episodes the n are worth: value (1 - value) / v, at least 1 and at most n (or
    `episodes_behind`), and the number of samples where all outcomes agree. The standard error is half the width of
    Wilson's interval of one standard deviation for that many, which is not zero for 0 right of 8.
    """
    right: dict[Hashable, float] = defaultdict(float)
    episodes: dict[Hashable, int] = defaultdict(int)
    for sample, is_right in outcomes:
        right[sample] += is_right
        episodes[sample] += 1
    n, samples = sum(episodes.values()), len(episodes)
    if not n:
        return None
    value = sum(right.values()) / n
    worth = float(samples)
    if 0 < value < 1:
        spread = sum((right[sample] - value * count) ** 2 for sample, count in episodes.items())
        variance = spread / n**2 * samples / (samples - 1) if samples > 1 else 1.0
        most = n if episodes_behind is None else episodes_behind
        worth = min(max(value * (1 - value) / variance, 1.0), most) if variance else float(most)
    half = math.sqrt(value * (1 - value) / worth + 1 / (4 * worth**2)) / (1 + 1 / worth)
    return Share(value, half, n, samples)


def clustered_error(values: Iterable[tuple[Hashable, float]]) -> float | None:
    """One standard error of a mean of (sample, value), episodes of one sample being one cluster; None of one sample."""
    by_sample: dict[Hashable, list[float]] = defaultdict(list)
    for sample, value in values:
        by_sample[sample].append(value)
    clusters, n = len(by_sample), sum(map(len, by_sample.values()))
    if clusters < 2:
        return None
    mean = sum(map(sum, by_sample.values())) / n
    spread = sum((sum(own) - mean * len(own)) ** 2 for own in by_sample.values())
    return math.sqrt(spread * clusters / (clusters - 1)) / n

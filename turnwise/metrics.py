"""Numbers that carry their own reduction, so that no reader has to guess whether to average or to add."""

import enum
from collections import defaultdict
from collections.abc import Iterable
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
    return {name: _reduce(seen, how[name]) for name, seen in values.items()}


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

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
    reducers = {Reduction.SUM: sum, Reduction.MAX: max, Reduction.MIN: min}
    return {
        name: sum(seen) / len(seen) if how[name] is Reduction.MEAN else float(reducers[how[name]](seen))
        for name, seen in values.items()
    }

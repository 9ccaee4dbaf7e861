"""What a detector reports: how bad, what was seen, what to do, and the filter that lists the trajectories behind it."""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.ext.board.columns import Snapshot
from turnwise.ext.board.filters import compile as compile_filter
from turnwise.ext.board.series import Series
from turnwise.ext.board.steps import Bools, Floats, Rows
from turnwise.ext.board.table import Table

CERTAIN = 4.0
"""Standard errors by which two shares must differ to be called different. Siblings are alike, so the true error is up
to twice the one computed from independent episodes; four of these are about two of those."""


class Severity(enum.StrEnum):
    """How much a finding matters: from nothing to see to an alarm."""

    OK = "ok"
    WATCH = "watch"
    """It may be meant, and it is worth a look."""
    ALARM = "alarm"
    """Training on is likely wasted until somebody looks."""


@dataclass(frozen=True, slots=True)
class DetectorFinding:
    """One detector's report.

    `filter` lists exactly the trajectories behind it, `count` says how many, `split` which of the lists to show.
    """

    id: str
    severity: Severity
    title: str
    text: str
    advice: str = ""
    steps: tuple[int, int] | None = None
    filter: str | None = None
    split: str = "train"
    metrics: tuple[str, ...] = ()
    count: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "severity": self.severity.value,
            "title": self.title,
            "text": self.text,
            "advice": self.advice,
            "steps": None if self.steps is None else list(self.steps),
            "filter": self.filter,
            "split": self.split,
            "metrics": list(self.metrics),
            "count": self.count,
        }


Detector = Callable[[Table, Series], DetectorFinding | None]
"""None: the run has nothing that this detector could judge."""


@dataclass(frozen=True, slots=True)
class CountShare:
    """So many of so many: `CountShare(3, 40)`."""

    hits: float
    of: float

    @classmethod
    def within(cls, hits: Bools, where: Bools) -> "CountShare":
        return cls(float((hits & where).sum()), float(where.sum()))

    @property
    def value(self) -> float:
        return self.hits / self.of if self.of else 0.0

    def __str__(self) -> str:
        return f"{percent(self.value)} ({self.hits:,.0f} of {self.of:,.0f})"


def rise(early: CountShare, late: CountShare) -> float:
    """By how much a share grew if that is certain, else 0."""
    if not early.of or not late.of:
        return 0.0
    pooled = (early.hits + late.hits) / (early.of + late.of)
    error = math.sqrt(pooled * (1 - pooled) * (1 / early.of + 1 / late.of))
    grown = late.value - early.value
    return grown if grown > CERTAIN * error else 0.0


@dataclass(frozen=True, slots=True)
class Gain:
    """How a number changed between two stretches, in its own unit and in deviations of its early values."""

    early: float
    late: float
    deviations: float
    certain: bool

    @classmethod
    def between(cls, values: Floats, early: Bools, late: Bools) -> "Gain | None":
        first, last = (values[where & np.isfinite(values)] for where in (early, late))
        if len(first) < 2 or len(last) < 2:
            return None
        change = float(last.mean() - first.mean())
        deviation = float(max(first.std(), last.std()))
        if deviation == 0.0:  # constant at both ends: any change at all is certain
            return cls(
                float(first.mean()), float(last.mean()), math.copysign(math.inf, change) if change else 0.0, True
            )
        error = math.sqrt(float(first.var()) / len(first) + float(last.var()) / len(last))
        return cls(float(first.mean()), float(last.mean()), change / deviation, abs(change) > CERTAIN * error)


def graded(value: float, watch: float, alarm: float) -> Severity:
    """The severity of a value that is worse the larger it is."""
    return Severity.ALARM if value >= alarm else Severity.WATCH if value >= watch else Severity.OK


def expression(*conditions: str, split: str = "train", steps: tuple[int, int] | None = None) -> str:
    """A filter: these conditions, in a split, between two steps."""
    bounds = [] if steps is None else [f"step >= {steps[0]}", f"step <= {steps[1]}"]
    return " and ".join([f'split == "{split}"', *bounds, *(condition for condition in conditions if condition)])


def matches(rows: Rows, filter: str) -> int:
    """How many trajectories a filter lists, by the very code that will list them."""
    snapshot = rows.snapshot
    return int(compile_filter(filter).mask(_Moment(snapshot)).sum())


@dataclass(frozen=True, slots=True)
class _Moment:
    snapshot: Snapshot


def plain(value: float) -> str:
    """A number as a reader and a filter take it: `0.0432`, `1200`, `3e-05`."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %" if value < 0.1 else f"{100 * value:.0f} %"


def span(steps: tuple[int, int]) -> str:
    return f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"

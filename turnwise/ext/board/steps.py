"""Rows and metrics by training step: grouping, thinning, and the first and last stretch of a run to compare."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnwise.ext.board.columns import KINDS, SPLITS, ColumnKind, Snapshot
from turnwise.ext.board.series import Series
from turnwise.ext.board.table import Table

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MOST_POINTS = 400
"""A chart is about 800 pixels wide; two pixels a point are as much as an eye can tell."""
DIGITS = 6
"""Of a number that goes to a chart."""
SHORTEST_WINDOW, LONGEST_WINDOW = 4, 100
"""Steps that are averaged before they are compared: fewer are noise, more hide when something began."""
WINDOW_SHARE = 5
"""A window is a fifth of the run between those bounds."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one split at one moment, in the order of their steps.

    `steps` are the different steps, `at` says for each row which of them it belongs to.
    """

    snapshot: Snapshot
    rows: Ints
    steps: Ints
    at: Ints

    @classmethod
    def of(cls, table: Table, split: str) -> "Rows":
        snapshot = table.snapshot
        rows = np.flatnonzero(snapshot.split == SPLITS.index(split))
        return cls(snapshot, rows, *_distinct(snapshot.columns["step"][rows]))

    def __len__(self) -> int:
        return len(self.rows)

    def number(self, name: str) -> Floats:
        """A number, count or yes-or-no column (1 and 0), nan for null."""
        values = self.snapshot.columns[name][self.rows].astype(np.float64)
        if KINDS[name] is ColumnKind.TRUTH:
            values[values < 0] = np.nan
        return np.asarray(values)

    def grouped(self, name: str) -> Floats:
        """`group_mean`, `group_std` or `group_size` of each row."""
        return np.asarray(self.snapshot.groups[name][self.rows])

    def codes(self, name: str) -> Ints:
        """A text column as numbers of the column's pool, -1 for null."""
        return np.asarray(self.snapshot.columns[name][self.rows].astype(np.int64))

    def different(self, name: str, where: Bools) -> list[int]:
        """The codes of a text column that occur in these rows, most frequent first."""
        codes = self.codes(name)[where]
        counts = np.bincount(codes[codes >= 0])
        order = np.argsort(-counts, kind="stable")
        present: list[int] = order[counts[order] > 0].tolist()
        return present

    def text(self, name: str, code: int) -> str:
        """The text that a code of a text column stands for."""
        return str(self.snapshot.pools.by_column[name].values[code])

    def means(self, values: Floats) -> Floats:
        """The mean of each step, nan for a step that has only null."""
        finite = np.isfinite(values)
        with np.errstate(invalid="ignore"):
            return totals(self.at[finite], values[finite], len(self.steps)) / totals(self.at, finite, len(self.steps))


def _distinct(steps: Ints) -> tuple[Ints, Ints]:
    """The different steps, and which of them each row has; quick when they are in order, as they mostly are."""
    change = np.diff(steps)
    if (change < 0).any():
        distinct, at = np.unique(steps, return_inverse=True)
        return distinct, at
    first = np.flatnonzero(np.concatenate([np.ones(min(len(steps), 1), dtype=bool), change > 0]))
    return steps[first], np.repeat(np.arange(len(first)), np.diff(np.append(first, len(steps))))


def totals(at: Ints, values: Floats | Bools, count: int) -> Floats:
    """The sum of the values at each place."""
    return np.asarray(np.bincount(at, weights=values, minlength=count), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Neighbouring steps taken together so that at most MOST_POINTS are left: the bucket of each step.

    All hold equally many steps, so that sums can be compared; only the first may hold fewer. A bucket stands at its
    middle step, one that occurred.
    """

    of_step: Ints
    steps: list[int]
    size: int

    @classmethod
    def over(cls, steps: Ints) -> "Buckets":
        size = max(-(-len(steps) // MOST_POINTS), 1)
        of_step = (np.arange(len(steps)) + -len(steps) % size) // size
        first, count = np.unique(of_step, return_index=True, return_counts=True)[1:]
        return cls(of_step, steps[first + (count - 1) // 2].tolist(), size)

    def __len__(self) -> int:
        return len(self.steps)


def jsonable(values: Floats) -> list[float | None]:
    """Numbers for JSON: null where there is none, and no more digits than a chart can show."""
    with np.errstate(divide="ignore", invalid="ignore"):
        places = np.nan_to_num(DIGITS - 1 - np.floor(np.log10(np.abs(values))), nan=0.0, posinf=0.0, neginf=0.0)
    scale = 10.0 ** np.clip(places, -300, 300)
    rounded: list[float] = (np.round(values * scale) / scale).tolist()
    return [value if math.isfinite(value) else None for value in rounded]


@dataclass(frozen=True, slots=True)
class Windows:
    """The first and the last so many steps of a run: `Windows(length=4)`."""

    length: int

    @classmethod
    def over(cls, steps: int) -> "Windows":
        return cls(int(np.clip(steps // WINDOW_SHARE, SHORTEST_WINDOW, LONGEST_WINDOW)))

    def early(self, rows: Rows) -> Bools:
        """Which rows belong to the first window of steps."""
        return np.asarray(rows.at < self.length)

    def late(self, rows: Rows) -> Bools:
        """Which rows belong to the last window of steps."""
        return np.asarray(rows.at >= len(rows.steps) - self.length)

    def late_steps(self, steps: Ints) -> tuple[int, int]:
        """The first and last of the last steps."""
        return int(steps[-self.length :][0]), int(steps[-1])


def windows(rows: Rows) -> Windows:
    """The stretches to compare in these rows."""
    return Windows.over(len(rows.steps))


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric by step, each step once (a resumed run writes some twice; the later counts), nan where not finite."""

    steps: Ints
    values: Floats

    @classmethod
    def of(cls, series: Series, name: str) -> "Curve":
        points = series.get(name)
        steps = np.array(points.step, dtype=np.int64)[::-1]
        unique_steps, first = np.unique(steps, return_index=True)
        return cls(unique_steps, np.array(points.value, dtype=np.float64)[::-1][first])

    def finite(self) -> "Curve":
        """Without the points that are no numbers."""
        finite = np.isfinite(self.values)
        return Curve(self.steps[finite], self.values[finite])

    def __len__(self) -> int:
        return len(self.steps)

    def ends(self) -> tuple[float, float]:
        """The medians of the first and of the last stretch."""
        length = Windows.over(len(self)).length
        return float(np.median(self.values[:length])), float(np.median(self.values[-length:]))

    def extreme(self, *, lowest: bool = False) -> tuple[float, tuple[int, int]]:
        """The largest (or smallest) median of any stretch, and its first and last step."""
        length = min(Windows.over(len(self)).length, len(self))
        stretches = np.lib.stride_tricks.sliding_window_view(self.values, length)
        medians = np.median(stretches, axis=1)
        order = np.lexsort((stretches.mean(axis=1), medians))  # of those with one median the most extreme on average
        at = int(order[0] if lowest else order[-1])
        return float(medians[at]), (int(self.steps[at]), int(self.steps[at + length - 1]))

    def late_steps(self) -> tuple[int, int]:
        """The first and last of the last stretch."""
        return Windows.over(len(self)).late_steps(self.steps)

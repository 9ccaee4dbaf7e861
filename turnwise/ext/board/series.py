"""The curves of one run: metrics.jsonl read as it grows, by column, and thinned to what a chart can show."""

import math
import threading
from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from turnwise.storage.file_tail import FileTail
from turnwise.storage.json_text import parse
from turnwise.storage.run_dir import METRICS, RunDir
from turnwise.system.files import cannot

AXES = ("step", "seconds", "tokens")
_MOST_PROBLEMS = 8


@dataclass(frozen=True, slots=True)
class Points:
    """One metric over time; all lists are equally long.

    `Points([1, 2], [8.1, 15.9], [900.0, 1800.0], [0.25, 0.31])`. A value, or a time or token count, that the file
    lacks or that is not finite is nan.
    """

    step: list[int]
    seconds: list[float]
    tokens: list[float]
    value: list[float]


class _Column:
    """One metric's values and the lines they stand in; two plain arrays, since a run has hundreds of columns."""

    __slots__ = ("lines", "values")

    def __init__(self) -> None:
        self.lines = array("L")
        self.values = array("d")


class Series:
    """All metrics of one run. `refresh` reads what was added since; the other methods may be called from any thread."""

    def __init__(self, run_dir: RunDir) -> None:
        self._tail = FileTail(run_dir.path / METRICS)
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._count = 0
        self._axes = (array("q"), array("d"), array("d"))
        self._columns: dict[str, _Column] = {}
        self._varying: set[str] = set()
        self._problems: list[str] = []

    def refresh(self) -> bool:
        """Read the complete lines that are new; True when anything changed. A file that was replaced is read again."""
        with self._lock:
            try:
                replaced, new = self._tail.poll()
                changed = replaced and self._count > 0
                if replaced:
                    self._clear()
                for line in self._tail.read(new):
                    if line.strip():
                        self._add(line)
            except OSError as error:
                raise cannot("read", self._tail.path, error) from error
            return changed or bool(new)

    def _add(self, line: bytes) -> None:
        number = self._count
        self._count += 1
        try:
            record = parse(line)
            step = record["step"]
            if type(step) is not int or not -(2**62) < step < 2**62:
                raise ValueError("its step is not an integer")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if len(self._problems) < _MOST_PROBLEMS:
                reason = "it has no step" if isinstance(error, KeyError) else error
                self._problems.append(f"{METRICS}, line {number + 1} cannot be read: {reason}")
            self._axes[0].append(-1)
            self._axes[1].append(math.nan)
            self._axes[2].append(math.nan)
            return
        self._axes[0].append(step)
        self._axes[1].append(_number(record.get("seconds")))
        self._axes[2].append(_number(record.get("tokens")))
        for name, value in record.items():
            if name in AXES or (value is not None and not isinstance(value, int | float)):
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Column()
            column.lines.append(number)
            column.values.append(_number(value))

    def names(self) -> list[str]:
        """Every metric seen so far, sorted."""
        with self._lock:
            return sorted(self._columns)

    def constants(self) -> dict[str, float]:
        """The metrics that had one value at every one of at least two lines, with that value: no curve says more."""
        with self._lock:
            for name, column in self._columns.items():
                if name not in self._varying and column.values.count(column.values[0]) < len(column.values):
                    self._varying.add(name)  # it never gets constant again, so it is not counted again
            still = {name: column.values for name, column in self._columns.items() if name not in self._varying}
            return {name: values[0] for name, values in still.items() if len(values) > 1}

    def problems(self) -> list[str]:
        """The first few lines that could not be read; they are left out of the curves."""
        with self._lock:
            return list(self._problems)

    def get(self, name: str) -> Points:
        """A metric's points; empty lists for a name that the run does not have."""
        with self._lock:
            column = self._columns.get(name)
            if column is None:
                return Points([], [], [], [])
            steps, seconds, tokens = self._axes
            lines = column.lines
            return Points(
                [steps[line] for line in lines],
                [seconds[line] for line in lines],
                [tokens[line] for line in lines],
                column.values.tolist(),
            )

    def thinned(self, name: str, points: int) -> dict[str, list[float | None]]:
        """A metric with at most `points` values, ready for JSON: step, seconds, tokens, value.

        More values than that are averaged in buckets of neighbours; `low` and `high` are then each bucket's range.
        """
        if points < 1:
            raise ValueError(f"points={points}")
        return thin(self.get(name), points)


def thin(full: Points, points: int) -> dict[str, list[float | None]]:
    """See Series.thinned. A bucket stands at its middle point, so that every x is one that occurred."""
    size = len(full.value)
    axes: tuple[tuple[str, list[int] | list[float]], ...]
    axes = (("step", full.step), ("seconds", full.seconds), ("tokens", full.tokens))
    if size <= points:
        return {name: _finite(axis) for name, axis in axes} | {"value": _finite(full.value)}
    edges = [size * number // points for number in range(points + 1)]
    middles = [(start + end - 1) // 2 for start, end in pairwise(edges)]
    thinned = {name: _finite([axis[middle] for middle in middles]) for name, axis in axes}
    value: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for start, end in pairwise(edges):
        bucket = [entry for entry in full.value[start:end] if math.isfinite(entry)]
        value.append(math.fsum(entry / len(bucket) for entry in bucket) if bucket else None)
        low.append(min(bucket) if bucket else None)
        high.append(max(bucket) if bucket else None)
    return thinned | {"value": value, "low": low, "high": high}


def _finite(values: list[int] | list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _number(value: Any) -> float:
    """A JSON value as a float; nan for what is missing, no number, or too large for one."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan

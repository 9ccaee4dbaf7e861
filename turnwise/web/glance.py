"""What the list of runs shows of each: a few lines picked out of metrics.jsonl, since reading them all takes long."""

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from turnwise.files import cannot
from turnwise.storage.run_dir import METRICS, RunDir

REWARD, ACCURACY = "critic/score/mean", "val/accuracy"
SPARK = 60
_FEW_LINES = 240
_RECENT = 20


@dataclass(frozen=True, slots=True)
class Glance:
    """The newest step, seconds, reward and accuracy of a run, and the course of its reward in at most 60 values."""

    step: int = 0
    seconds: float | None = None
    reward: float | None = None
    accuracy: float | None = None
    spark: tuple[float, ...] = ()
    step_seconds: float = 0.0
    """Typical seconds between the newest steps."""


def glance(run: RunDir) -> Glance:
    """Look at a run's metrics; an evaluation, which has none, is looked up in its report."""
    path = run.path / METRICS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Glance(accuracy=_reported(run))
    except OSError as error:
        raise cannot("read", path, error) from error
    data = data[: data.rfind(b"\n") + 1]
    recent = [record for line in data[_start_of_last(data, _RECENT) :].split(b"\n") if (record := _record(line))]
    newest = recent[-1] if recent else {}
    trained = [(record["step"], seconds) for record in recent if (seconds := _number(record, "seconds")) is not None]
    between = [
        later[1] - earlier[1] for earlier, later in pairwise(trained) if later[0] > earlier[0] and later[1] > earlier[1]
    ]
    return Glance(
        step=newest.get("step", 0),
        seconds=_number(newest, "seconds"),
        reward=_last(data, REWARD),
        accuracy=_last(data, ACCURACY),
        spark=tuple(_spark(data)),
        step_seconds=statistics.median(between) if between else 0.0,
    )


def _start_of_last(data: bytes, lines: int) -> int:
    """Where the last so many lines begin."""
    at = len(data) - 1  # the line end of the last one
    for _ in range(lines):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return 0
    return at + 1


def _last(data: bytes, name: str) -> float | None:
    """The newest value of a metric."""
    needle = json.dumps(name).encode() + b":"
    end = len(data)
    while (at := data.rfind(needle, 0, end)) >= 0:
        start = data.rfind(b"\n", 0, at) + 1
        value = _number(_record(data[start : data.find(b"\n", at)]), name)
        if value is not None:
            return value
        end = start
    return None


def _spark(data: bytes) -> Iterator[float]:
    """The reward's course: of all lines if they are few, else of lines picked at equal distances in the file."""
    if data.count(b"\n") <= _FEW_LINES:
        values = [value for line in data.split(b"\n") if (value := _number(_record(line), REWARD)) is not None]
        count = min(SPARK, len(values))
        yield from (values[(len(values) - 1) * place // max(count - 1, 1)] for place in range(count))
        return
    seen = -1
    for place in range(SPARK):
        at = data.find(b"\n", len(data) * place // SPARK) + 1 if place else 0
        for _ in range(4):  # an evaluation's line has no reward: take the next
            end = data.find(b"\n", at)
            if end < 0 or at <= seen:
                break
            seen = at
            value = _number(_record(data[at:end]), REWARD)
            if value is not None:
                yield value
                break
            at = end + 1


def _reported(run: RunDir) -> float | None:
    """The accuracy in the newest report of an evaluation."""
    found_here = sorted((run.path / "eval").glob("step_*.json"))
    reports = [path for path in found_here if path.is_file() and not path.is_symlink()]  # a pipe would wait for ever
    found = _record(_bytes(reports[-1])) if reports else None
    if found is None:
        return None
    if (accuracy := _number(found, "accuracy")) is not None:
        return accuracy
    sources = found.get("sources")
    parts = [one for one in sources.values() if isinstance(one, dict)] if isinstance(sources, dict) else []
    pairs = [(_number(one, "accuracy"), _number(one, "episodes")) for one in parts]
    known = [(accuracy, episodes) for accuracy, episodes in pairs if accuracy is not None and episodes]
    total = sum(episodes for _, episodes in known)
    return sum(accuracy * episodes for accuracy, episodes in known) / total if total else None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise cannot("read", path, error) from error


def _record(line: bytes) -> dict[str, Any] | None:
    """A line's object; None for anything else, which Series.problems tells of."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return record if type(record.setdefault("step", 0)) is int else None


def _number(record: dict[str, Any] | None, name: str) -> float | None:
    value = None if record is None else record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None

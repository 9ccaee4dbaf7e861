"""What the list of runs shows of each: a few numbers of metrics.jsonl, read on as it grows."""

import json
import math
import re
import statistics
from array import array
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from turnwise.storage.file_tail import FileTail
from turnwise.storage.run_dir import METRICS, RunDir
from turnwise.system.files import cannot, check_regular

REWARD, ACCURACY, ERROR, STEP = "critic/score/mean", "val/accuracy", "val/accuracy_stderr", "step"
LOSS = "sft/loss"
SPARK = 60
_RECENT = 20
_NUMBER = re.compile(rb"\s*-?\d{1,400}(\.\d{1,400})?([eE][+-]?\d{1,4})?(?=\s*[,}])")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The newest step, seconds, reward, loss and accuracy of a run, and its reward in at most 60 values."""

    step: int = 0
    seconds: float | None = None
    reward: float | None = None
    loss: float | None = None
    """Of a fine-tuning, which has no reward."""
    accuracy: float | None = None
    accuracy_error: float | None = None
    """One standard error."""
    accuracy_step: int | None = None
    """The step that was evaluated."""
    spark: tuple[float, ...] = ()
    """Of the reward, or of the loss."""
    step_seconds: float = 0.0
    """Typical seconds between the newest steps."""


class MetricsReader:
    """What a summary needs of a run's metrics.jsonl: read once, then on from where it was left."""

    def __init__(self, run: RunDir) -> None:
        self._tail = FileTail(run.path / METRICS)
        self._forget()

    def _forget(self) -> None:
        self.recent: deque[bytes] = deque(maxlen=_RECENT)
        self.rewards, self.losses = array("d"), array("d")
        self.accuracy: tuple[float, float | None, int] | None = None
        """The newest: its value, its standard error, its step."""

    def read_on(self) -> None:
        """Take in the whole lines that are new; a file that was replaced is read again."""
        replaced, new = self._tail.poll()
        if replaced:
            self._forget()
        for line in self._tail.read(new):
            self._take(line)

    def _take(self, line: bytes) -> None:
        self.recent.append(line)
        if (reward := _value(line, REWARD)) is not None:
            self.rewards.append(reward)
        elif (loss := _value(line, LOSS)) is not None:
            self.losses.append(loss)
        if (accuracy := _value(line, ACCURACY)) is not None:
            self.accuracy = accuracy, _value(line, ERROR), int(_value(line, STEP) or 0)


def summarise_run(run: RunDir, reader: MetricsReader | None = None) -> RunSummary:
    """A run's newest numbers; what an evaluation has not among its metrics is looked up in its report.

    `reader` has what was read before.
    """
    reader = reader or MetricsReader(run)
    try:
        reader.read_on()
    except OSError as error:
        raise cannot("read", run.path / METRICS, error) from error
    if not reader.recent:
        return _reported(run)
    recent = [record for line in reader.recent if (record := _record(line))]
    newest = recent[-1] if recent else {}
    trained = [(record["step"], seconds) for record in recent if (seconds := number(record, "seconds")) is not None]
    between = [
        later[1] - earlier[1] for earlier, later in pairwise(trained) if later[0] > earlier[0] and later[1] > earlier[1]
    ]
    rewards, losses = reader.rewards, reader.losses
    course = rewards or losses
    accuracy, stderr, step = reader.accuracy or (None, None, None)
    count = min(SPARK, len(course))
    return RunSummary(
        step=newest.get("step", 0),
        seconds=number(newest, "seconds"),
        reward=rewards[-1] if rewards else _reported(run).reward,
        loss=losses[-1] if losses else None,
        accuracy=accuracy,
        accuracy_error=stderr,
        accuracy_step=step,
        spark=tuple(course[(len(course) - 1) * point // max(count - 1, 1)] for point in range(count)),
        step_seconds=statistics.median(between) if between else 0.0,
    )


def _value(line: bytes, name: str) -> float | None:
    """A metric of a line, which is not read whole: a run has thousands of lines with a hundred metrics each."""
    at = line.find(needle := json.dumps(name).encode() + b":")
    match = _NUMBER.match(line, at + len(needle)) if at >= 0 else None
    value = float(match[0]) if match else math.nan
    return value if math.isfinite(value) else None


def read_report(run: RunDir) -> dict[str, Any] | None:
    """The newest report of an evaluation; None when there is none, or it cannot be read."""
    found_here = sorted((run.path / "eval").glob("step_*.json"))
    reports = [path for path in found_here if path.is_file() and not path.is_symlink()]  # a pipe would wait for ever
    return _record(_bytes(reports[-1])) if reports else None


def _reported(run: RunDir) -> RunSummary:
    """What the newest report of an evaluation says: accuracy and reward over all data sources."""
    report = read_report(run)
    if report is None:
        return RunSummary()
    sources = report.get("sources")
    parts = [part for part in sources.values() if isinstance(part, dict)] if isinstance(sources, dict) else []
    accuracy = number(report, "accuracy")
    return RunSummary(
        reward=_overall(parts, "reward"),
        accuracy=_overall(parts, "accuracy") if accuracy is None else accuracy,
        accuracy_error=None if accuracy is None else number(report, "accuracy_stderr"),
    )


def _overall(parts: list[dict[str, Any]], name: str) -> float | None:
    """The mean of a number of each data source, by its episodes."""
    pairs = [(number(part, name), number(part, "episodes")) for part in parts]
    counted = [(value, episodes) for value, episodes in pairs if value is not None and episodes]
    total = sum(episodes for _, episodes in counted)
    return sum(value * episodes for value, episodes in counted) / total if total else None


def _bytes(path: Path) -> bytes:
    try:
        check_regular(path)
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


def number(record: dict[str, Any] | None, name: str) -> float | None:
    """A finite number of a record; None for anything else."""
    value = None if record is None else record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None

"""Whether a run is still alive: what it says in status.json, checked against the clock and this machine's processes."""

import enum
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from turnwise.errors import StorageError
from turnwise.storage.file_tail import end_of_text
from turnwise.storage.run_dir import CONFIG, METRICS, RunDir
from turnwise.storage.status import STATUS, State, Status, read_status

QUIET_SECONDS = 120.0
QUIET_STEPS = 10
QUIET_AT_FIRST = 1800.0
"""Before the first step nothing says how long things take: a model is loaded, an evaluation is played."""
GONE = "its process ended without giving a reason: perhaps killed because memory ran out"
_LOG_BYTES, _LONGEST_LINE = 4000, 300
_CLOCK_SLACK = 10.0
_LATEST = 1e15
"""Seconds; no clock shows more. Neither nan nor an integer too large for a float is below it."""


class DisplayedState(enum.StrEnum):
    """The state a person sees: the run's own word, or what became of a run that says it is running."""

    RUNNING = "running"
    STALLED = "stalled"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Liveness:
    """How a run is doing: `Liveness(DisplayedState.STALLED, "no word for 240 s", "train", 12, 38, 1.8e9, 1.8e9)`."""

    state: DisplayedState
    reason: str
    command: str
    step: int
    steps: int | None
    started: float
    updated: float


def liveness_of(run: RunDir, now: float, step_seconds: Callable[[], float]) -> Liveness:
    """How a run is doing; `step_seconds` says how long its steps take, and is asked only when it was quiet."""
    try:
        status = read_status(run)
        if status is not None:
            _check(status, run)
    except StorageError as error:
        return _unknown(run, str(error))
    if status is None:
        return _unknown(run, "it left no status.json")
    updated = max(status.updated, _changed(run, METRICS))
    state, reason = DisplayedState(status.state.value), status.reason
    if status.state is State.RUNNING:
        if status.host == socket.gethostname() and not _alive(status):
            state, reason = DisplayedState.FAILED, _gone(run)
        elif now - updated > QUIET_SECONDS and now - updated > (limit := _long(step_seconds())):
            state = DisplayedState.STALLED
            reason = f"no sign of life for {now - updated:.0f} s; more than {limit:.0f} s is unusual"
    return Liveness(state, reason, status.command, status.step, status.steps, status.started, updated)


def _gone(run: RunDir) -> str:
    """Why a process that left no word is gone, as far as its log says."""
    try:
        lines = end_of_text(run.log_path, _LOG_BYTES).split("\n")
    except OSError:  # the pages say which file cannot be read
        lines = []
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"{GONE}. The last line of its log: {last.strip()[:_LONGEST_LINE]}" if last else GONE


def _long(step_seconds: float) -> float:
    """Seconds of silence after which something is wrong."""
    return max(QUIET_SECONDS, QUIET_STEPS * step_seconds) if step_seconds else QUIET_AT_FIRST


def _unknown(run: RunDir, reason: str) -> Liveness:
    started = _changed(run, CONFIG)
    return Liveness(DisplayedState.UNKNOWN, reason, "", 0, None, started, max(started, _changed(run, METRICS)))


def _check(status: Status, run: RunDir) -> None:
    """A status file is read as it stands; here its values are used in sums."""
    times, counts = (status.started, status.updated), (status.pid, status.step, status.steps or 0)
    texts = (status.command, status.host, status.reason)
    if (
        not all(isinstance(value, int | float) and abs(value) < _LATEST for value in times)
        or not all(type(value) is int for value in counts)
        or not all(isinstance(value, str) for value in texts)
    ):
        raise StorageError(f"{run.path / STATUS} is damaged: {status}")


def _changed(run: RunDir, name: str) -> float:
    try:
        return (run.path / name).stat().st_mtime
    except OSError:  # not there yet
        return 0.0


def _alive(status: Status) -> bool:
    """Whether the process that wrote the status still runs; a younger one with its number is another."""
    if status.pid <= 0:
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False
    except PermissionError:  # somebody else's, so it is there
        pass
    try:
        with open(f"/proc/{status.pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        with open("/proc/stat", encoding="utf-8") as file:
            booted = next(float(line.split()[1]) for line in file if line.startswith("btime "))
    except (OSError, StopIteration):  # a system without /proc: its number is all there is to know
        return True
    began = booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] not in ("Z", "X") and began <= status.started + _CLOCK_SLACK

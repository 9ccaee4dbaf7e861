"""How a run is doing, in its own words: status.json, rewritten at every step and at the end."""

import asyncio
import contextlib
import enum
import json
import os
import socket
import time
import traceback
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

from turnwise.errors import StorageError, first_cause, one_line
from turnwise.storage.run_dir import RunDir

STATUS = "status.json"


class State(enum.StrEnum):
    """What a run says about itself; a reader finds out whether a running one is still alive."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """By a signal or a budget; it can be resumed."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Status:
    """`Status(State.RUNNING, "train", started=1.8e9, updated=1.8e9, pid=71, host="here", step=3, steps=38)`."""

    state: State
    command: str
    started: float
    updated: float
    pid: int
    host: str
    reason: str = ""
    step: int = 0
    steps: int | None = None

    @classmethod
    def beginning(cls, command: str, steps: int | None = None) -> "Status":
        """The status of a run that this process starts now."""
        now = time.time()
        return cls(State.RUNNING, command, now, now, os.getpid(), socket.gethostname(), steps=steps)

    def at(self, step: int) -> "Status":
        """The same run, now at this step."""
        return replace(self, step=step, updated=time.time())

    def ended(self, state: State, reason: str) -> "Status":
        """The same status of a run that is over now, with the reason."""
        return replace(self, state=state, reason=reason, updated=time.time())


class StatusWriter:
    """Keeps status.json true while a block runs, also when it fails: `with StatusWriter(run, "eval") as status:`."""

    def __init__(self, run: RunDir, command: str, steps: int | None = None) -> None:
        self._run, self._status = run, Status.beginning(command, steps)
        self.end, self.reason = State.FINISHED, ""
        """What is said when the block ends well."""

    def expect(self, steps: int) -> None:
        """The run will have this many steps."""
        self._status = replace(self._status, steps=steps)

    def at(self, step: int) -> None:
        """Writes that the run has finished this step."""
        self._status = self._status.at(step)
        write_status(self._run, self._status)

    def __enter__(self) -> Self:
        write_status(self._run, self._status)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            write_status(self._run, self._status.ended(self.end, self.reason))
            return
        state, reason = how_it_ended(error)
        with contextlib.suppress(StorageError):  # the error itself is the news, also when the disk is full
            write_status(self._run, self._status.ended(state, reason))
            self._run.log(f"{state.value}: {reason}")
            if state is State.FAILED:
                self._run.log("where it failed:\n" + "".join(traceback.format_exception(error)).rstrip())


def how_it_ended(error: BaseException) -> tuple[State, str]:
    """What an error that ends a run says about it, on one line."""
    if isinstance(first_cause(error), KeyboardInterrupt | asyncio.CancelledError):
        return State.STOPPED, str(error) or "interrupted"
    return State.FAILED, one_line(error)


def write_status(run: RunDir, status: Status) -> None:
    """Replaces the run's status.json by this status."""
    run.write_json(STATUS, asdict(status) | {"state": status.state.value})


def read_status(run: RunDir) -> Status | None:
    """What the run last said; None when it never said anything."""
    if not (run.path / STATUS).is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(run.read_text(STATUS))
        return Status(**record | {"state": State(record["state"])})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(f"{run.path / STATUS} is damaged: {error}") from error

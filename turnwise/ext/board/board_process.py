"""A board beside a training: a process of its own that ends with its parent, and never stops it."""

import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.ext.board.config import BoardConfig
from turnwise.system import children

READY = "board: "
START_SECONDS = 30.0
END_SECONDS = 5.0
_LONGEST = 20_000


@dataclass(slots=True)
class BoardProcess:
    """A board that was started: where it is, or in `note` why there is none."""

    url: str | None
    note: str
    _process: children.Process | None = None

    def close(self) -> None:
        """End it, kindly at first; it would also end if this process was killed."""
        process, self._process = self._process, None
        if process is not None:
            children.end(process, END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def beside_run(config: Config, runs: Path, command: str) -> BoardProcess | None:
    """The board that a run's config asks for; one that only plays a recorded episode again has none."""
    board = section(config, BoardConfig)
    return start_board(runs, board.port) if board.live and command != "replay" else None


def start_board(runs: Path, port: int, *, start_seconds: float = START_SECONDS) -> BoardProcess:
    """Start a board for a folder of runs, on this port or else a free one.

    A board that cannot start is a note, whatever the reason: it is there to look at the training, not to stop it.
    """
    command = [sys.executable, "-m", "turnwise.commands.cli", "board", str(runs), "--port", str(port), "--child"]
    try:
        process = children.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return BoardProcess(None, f"the board could not start: {error.strerror or error}")
    assert process.stdout is not None
    with process.stdout as output:
        text = _first_output(output.fileno(), time.monotonic() + start_seconds)
    for line in text.splitlines():
        if line.startswith(READY):
            return BoardProcess(line.removeprefix(READY), line, process)
    BoardProcess(None, "", process).close()
    last = text.strip().splitlines()[-1:] or [f"it did not say where it is for {start_seconds:.0f} s"]
    return BoardProcess(None, f"the board could not start: {last[0]}")


def _first_output(descriptor: int, until: float) -> str:
    """What is written until the URL is told, the writer ends, or the time is up."""
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while len(received) < _LONGEST and not _has_url(received):
            left = until - time.monotonic()
            if left <= 0 or not selector.select(left):
                break
            chunk = os.read(descriptor, 4096)
            if not chunk:
                break
            received += chunk
    return received.decode("utf-8", "replace")


def _has_url(received: bytes) -> bool:
    """Whether a whole line with the URL is among the words."""
    return any(line.startswith(READY.encode()) for line in received.splitlines(keepends=True) if line.endswith(b"\n"))

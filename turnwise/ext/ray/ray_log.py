"""What Ray and the actors say: it goes into a file of the run, and what actors print comes to the console too."""

import logging
import sys
import threading
from collections import deque
from importlib import import_module
from pathlib import Path
from typing import Any, Self

FILE = "ray.log"
KEPT_LINES = 2000
"""While there is no run yet to keep them in."""
_WORKER = "ray._private.worker"
_NEWS = ":event_summary:"
"""In a line of the autoscaler that something happened."""
_SINK = "print_worker_logs"
"""Where Ray prints what it hears from all nodes; it has no setting for another place."""


class RayLog(logging.Handler):
    """Stands between Ray and the console while its block runs, in which Ray is joined and left.

    Raylets dump their state and actors a stack of C++ when a node or a process goes away, which the run survives and
    says in a line of its own.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        self._waiting: deque[str] = deque(maxlen=KEPT_LINES)
        self._guard = threading.Lock()
        self._path: Path | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        worker, logger = import_module(_WORKER), logging.getLogger("ray")
        self._before = getattr(worker, _SINK), logger.propagate, logger.level
        setattr(worker, _SINK, self.hear)
        logger.addHandler(self)
        logger.propagate = False
        logger.setLevel(logging.ERROR)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("ray")
        logger.removeHandler(self)
        sink, logger.propagate, level = self._before
        logger.setLevel(level)
        setattr(import_module(_WORKER), _SINK, sink)

    def keep_in(self, folder: Path | None) -> str:
        """From now on in a file of this folder, with what came before; where it is, in words."""
        if folder is not None:
            with self._guard:
                self._path = folder / FILE
            self._write([])
        return "" if self._path is None else f"; what Ray says of itself is in {self._path}"

    def hear(self, data: dict[str, Any], _stream: Any = None, ignore_prefix: bool = False) -> None:
        """A batch of lines of one process, as Ray hands them out."""
        name, pid = data.get("actor_name") or data.get("task_name") or "", data.get("pid", "")
        who = f"({f'{name} pid=' if name else ''}{pid}, {data.get('ip', 'here')})"
        texts = [line for line in data.get("lines", ()) if pid != "autoscaler" or _NEWS in line]  # else every 5 seconds
        lines = [f"{who} {line}" for line in texts]
        self._write(lines)
        if name and not data.get("is_err"):
            sys.stderr.write("".join(f"{line}\n" for line in lines))

    def emit(self, record: logging.LogRecord) -> None:
        """What Ray logs in this process."""
        self._write([self.format(record)])

    def _write(self, lines: list[str]) -> None:
        with self._guard:
            self._waiting.extend(lines)
            if self._path is None or not self._waiting:
                return
            try:
                with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write("".join(f"{line}\n" for line in self._waiting))
                self._waiting.clear()
            except OSError:  # the disk is full or the folder gone: the run itself says so, not a thread of Ray's
                return

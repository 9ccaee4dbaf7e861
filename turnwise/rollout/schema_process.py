"""The host's end of the schema checkers: a few processes, so that no pattern and no schema holds the run."""

import asyncio
import atexit
import json
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from turnwise.clocked_process import ClockedProcess, NoAnswer, ProcessEnded

PROCESSES = 2
SECONDS = 1.0
"""CPU time of one check; the honest ones take a thousandth of it."""
SPARE_SECONDS = 60.0
"""Wall time beyond it: for starting, and for a machine that has no time for us."""
ASKED = 100_000
_SCRIPT = Path(__file__).with_name("schema_checker.py")


class CheckTookTooLong(Exception):
    """A check that its clock ended, or that nobody answered."""


class _Checker(ClockedProcess):
    def __init__(self) -> None:
        super().__init__(ASKED)

    @property
    def script(self) -> Path:
        return _SCRIPT

    def problem(self, request: bytes, seconds: float) -> str | None:
        for attempt in (1, 2):
            try:
                problem: str | None = json.loads(self.ask(request, seconds + SPARE_SECONDS))["problem"]
                return problem
            except ProcessEnded as error:
                if error.is_too_much or attempt == 2:
                    raise CheckTookTooLong(f"took longer than {seconds:g} s") from error
            except NoAnswer as error:
                raise CheckTookTooLong(str(error)) from error
        raise AssertionError("unreachable")


class SchemaCheckers:
    """All processes of this one, made when first needed and lent to whoever asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: queue.LifoQueue[_Checker] = queue.LifoQueue()
        self._threads: ThreadPoolExecutor | None = None
        self._all: list[_Checker] = []

    def problem(self, schema: str, **arguments: Any) -> str | None:
        """What is wrong with a schema, or with `arguments` for it; from a thread that may wait."""
        seconds = SECONDS
        request = json.dumps({"schema": schema, "seconds": seconds, **arguments}) + "\n"
        checker = self._take()
        try:
            return checker.problem(request.encode(), seconds)
        finally:
            self._idle.put(checker)

    async def problem_soon(self, schema: str, **arguments: Any) -> str | None:
        """The same without holding the event loop."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(PROCESSES, "schemas")
            threads = self._threads
        work = asyncio.get_running_loop().run_in_executor(threads, lambda: self.problem(schema, **arguments))
        return await work

    def close(self) -> None:
        """End every process; the next question starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
            every, self._all, self._idle = self._all, [], queue.LifoQueue()
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        for checker in every:
            checker.close()

    def forget(self) -> None:
        """After a fork: the processes are the parent's."""
        self._lock, self._idle, self._threads, self._all = threading.Lock(), queue.LifoQueue(), None, []

    def _take(self) -> _Checker:
        with self._lock:
            if self._idle.empty() and len(self._all) < PROCESSES:
                self._all.append(_Checker())
                return self._all[-1]
            idle = self._idle
        return idle.get()


checkers = SchemaCheckers()
atexit.register(checkers.close)
os.register_at_fork(after_in_child=checkers.forget)

"""The host's end of the math checkers: a few processes, each asked by its own thread, restarted when they end."""

import asyncio
import atexit
import json
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from turnwise.clocked_process import ClockedProcess, NoAnswer, ProcessEnded
from turnwise.errors import ScoringFailed

PROCESSES = min(4, os.cpu_count() or 1)
SPARE_SECONDS = 60.0
"""Wall time beyond the CPU seconds of a comparison: for starting, and for a machine that has no time for us."""
ASKED = 5000
"""Comparisons after which a process is replaced, because sympy's caches only grow."""
KEPT = 16384
"""Comparisons remembered: siblings of a group often say the same."""
_SCRIPT = Path(__file__).with_name("math_checker.py")


class Checker(ClockedProcess):
    """One process. Used by one thread at a time."""

    def __init__(self) -> None:
        super().__init__(ASKED)

    @property
    def script(self) -> Path:
        return _SCRIPT

    def equal(self, golds: tuple[str, ...], answer: str, seconds: float) -> bool:
        """Whether they mean the same. What takes more than `seconds` of CPU time does not; ScoringFailed when the
        process failed for another reason, twice."""
        request = json.dumps({"golds": golds, "answer": answer, "seconds": seconds}) + "\n"
        for attempt in (1, 2):
            try:
                return bool(json.loads(self.ask(request.encode(), seconds + SPARE_SECONDS))["equal"])
            except ProcessEnded as error:
                if error.is_too_much:
                    return False
                if attempt == 2:
                    raise ScoringFailed(f"the math checker: {error}") from error
            except NoAnswer as error:
                raise ScoringFailed(f"the math checker did not answer: {error}") from error
        raise AssertionError("unreachable")


class Checkers:
    """All processes of this one, made when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._all: list[Checker] = []
        self._threads: ThreadPoolExecutor | None = None
        self._known: OrderedDict[tuple[tuple[str, ...], str, float], bool] = OrderedDict()

    async def equal(self, golds: tuple[str, ...], answer: str, seconds: float) -> bool:
        """Whether the answer means one of the golds; from any thread and event loop."""
        key = (golds, answer, seconds)
        with self._lock:
            if key in self._known:
                return self._known[key]
            if self._threads is None:
                self._threads = ThreadPoolExecutor(PROCESSES, "math")
            threads = self._threads
        found = await asyncio.get_running_loop().run_in_executor(threads, self._ask, golds, answer, seconds)
        with self._lock:
            self._known[key] = found
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found

    def _ask(self, golds: tuple[str, ...], answer: str, seconds: float) -> bool:
        checker: Checker | None = getattr(self._mine, "checker", None)
        if checker is None:
            checker = self._mine.checker = Checker()
            with self._lock:
                self._all.append(checker)
        return checker.equal(golds, answer, seconds)

    def close(self) -> None:
        """End every process; the next question starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
            every, self._all, self._mine = self._all, [], threading.local()
        if threads is not None:
            threads.shutdown()
        for checker in every:
            checker.close()

    def forget(self) -> None:
        """After a fork: the processes are the parent's."""
        self._lock = threading.Lock()
        self._threads, self._all, self._mine = None, [], threading.local()


checkers = Checkers()
atexit.register(checkers.close)
os.register_at_fork(after_in_child=checkers.forget)

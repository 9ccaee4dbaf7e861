"""The host's end of the math checkers: a few processes, each asked by its own thread, restarted when they end."""

import asyncio
import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from turnwise.errors import ScoringFailed

PROCESSES = min(4, os.cpu_count() or 1)
SPARE_SECONDS = 60.0
"""Wall time beyond the CPU seconds of a comparison: for starting, and for a machine that has no time for us."""
ASKED = 5000
"""Comparisons after which a process is replaced, because sympy's caches only grow."""
KEPT = 16384
"""Comparisons remembered: siblings of a group often say the same."""
TOO_MUCH = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
"""How a process ends when the answer was too much for it: the clock, or an overrun stack."""
_SCRIPT = Path(__file__).with_name("math_checker.py")


class _Ended(Exception):
    """The process ended in the middle of a question."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the math checker ended with status {status}")
        self.status = status


class Checker:
    """One process. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0

    def equal(self, golds: tuple[str, ...], answer: str, seconds: float) -> bool:
        """Whether they mean the same. What takes more than `seconds` of CPU time does not; ScoringFailed when the
        process failed for another reason, twice."""
        request = json.dumps({"golds": golds, "answer": answer, "seconds": seconds}) + "\n"
        for attempt in (1, 2):
            try:
                return self._ask(request.encode(), seconds + SPARE_SECONDS)
            except _Ended as error:
                if error.status in TOO_MUCH:
                    return False
                if attempt == 2:
                    raise ScoringFailed(str(error)) from error
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, request: bytes, wall: float) -> bool:
        if self._process is None or self._asked >= ASKED:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        self._asked += 1
        deadline = time.monotonic() + wall
        try:
            process.stdin.write(request)
        except BrokenPipeError:
            raise self._ended() from None
        reply = b""
        while not reply.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.close()
                raise ScoringFailed(f"the math checker did not answer within {wall:g} s")
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                raise self._ended()
            reply += piece
        return bool(json.loads(reply)["equal"])

    def _start(self) -> None:
        self.close()
        # -P: our folder has a math.py, which must not stand in for Python's own.
        command = [sys.executable, "-P", str(_SCRIPT)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._asked = 0

    def _ended(self) -> _Ended:
        assert self._process is not None
        status = self._process.wait()
        self.close()
        return _Ended(status)


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

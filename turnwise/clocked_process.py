"""A small process that is asked questions which may take for ever: its CPU clock ends it, and the next one starts anew.

No thread can be stopped that runs a regular expression or an arithmetic of ours, and it would hold the interpreter.
The script reads JSON lines and answers each with one; it sets `signal.ITIMER_PROF` for the time of an answer.
"""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

TOO_MUCH = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
"""How a process ends when a question was too much for it: the clock, or an overrun stack."""


class ProcessEnded(Exception):
    """It ended in the middle of a question."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it ended with status {status}")
        self.status = status

    @property
    def is_too_much(self) -> bool:
        """Whether the question is why."""
        return self.status in TOO_MUCH


class NoAnswer(Exception):
    """It says nothing, although its clock should have ended it: it is stopped, or the machine has no time for it."""


class ClockedProcess:
    """One process, made when first asked. Used by one thread at a time."""

    def __init__(self, most_asked: int) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0
        self._most_asked = most_asked

    @property
    def script(self) -> Path:
        """What it runs; it imports nothing of this package."""
        raise NotImplementedError

    def ask(self, request: bytes, wall: float) -> bytes:
        """The line that answers a line, within so many seconds."""
        if self._process is None or self._asked >= self._most_asked:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        self._asked += 1
        deadline = time.monotonic() + wall
        left = memoryview(request)
        try:
            while left:
                left = left[os.write(process.stdin.fileno(), left) :]
        except BrokenPipeError:
            raise self._ended() from None
        reply = bytearray()
        while not reply.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.close()
                raise NoAnswer(f"no answer within {wall:g} s")
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._ended()
            reply += piece
        return bytes(reply)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        self.close()
        # -P: the script's folder must not stand in for Python's own modules.
        command = [sys.executable, "-P", str(self.script)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._asked = 0

    def _ended(self) -> ProcessEnded:
        assert self._process is not None
        status = self._process.wait()
        self.close()
        return ProcessEnded(status)

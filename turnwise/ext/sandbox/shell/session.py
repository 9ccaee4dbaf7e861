"""A shell session: a folder of files that lasts, and commands in it, one at a time, each with a deadline."""

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.ext.sandbox import wire
from turnwise.ext.sandbox.inside.capture import cut
from turnwise.ext.sandbox.inside.isolate import SCRATCH
from turnwise.ext.sandbox.inside.shell import STOP
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.results import clean
from turnwise.ext.sandbox.session import SMALL, SandboxProcess
from turnwise.ext.sandbox.session_process import Child
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.system import time_budget

WATCH_SECONDS = 0.05
GRACE_SECONDS = 10.0
"""For the session's first process to end a command and to answer."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_COMMAND = 100_000
"""Characters of one command; the kernel takes no more than 128 KiB in one argument."""
ENVIRONMENT = {
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GIT_PAGER": "cat",
    "PAGER": "cat",
    "GIT_AUTHOR_NAME": "sandbox",
    "GIT_AUTHOR_EMAIL": "sandbox@localhost",
    "GIT_COMMITTER_NAME": "sandbox",
    "GIT_COMMITTER_EMAIL": "sandbox@localhost",
}
"""Of every command, with where programs and Python's library are found; nothing of ours."""
PLACES = ("PATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command went: `Ran("4\\n", exit=0)`. `stopped` says why it was ended, and then there is no exit code."""

    output: str
    """stdout and stderr as they came; the middle of a long one is left out."""
    exit: int | None = None
    stopped: str | None = None

    @property
    def fine(self) -> bool:
        """Whether it came to its end and says so."""
        return self.exit == 0


class ShellSession:
    """Commands in a folder of their own. Lost machinery is SandboxLost, and the files are lost with it."""

    def __init__(
        self,
        acquire: Callable[[], Awaitable[SandboxProcess]],
        slots: asyncio.Semaphore,
        limits: Limits,
        environment: dict[str, str],
    ) -> None:
        self.limits = limits
        self._environment = {**ENVIRONMENT, **environment}
        self._acquire = acquire
        self._slots = slots
        self._place: SandboxProcess | None = None
        self._turn = asyncio.Lock()
        self._calls = 0
        self._lost: str | None = None

    async def __aenter__(self) -> "ShellSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
        self,
        command: str = "",
        *,
        argv: Sequence[str] = (),
        folder: str = SCRATCH,
        stdin: bytes = b"",
        seconds: float | None = None,
        output: int | None = None,
    ) -> Ran:
        """Run `command` in bash, or a program by `argv`, with `stdin` on its standard input."""
        words = list(argv) or ["bash", "-c", command]
        if sum(map(len, words)) > MAX_COMMAND or any("\0" in word for word in words):
            return Ran(f"not run: a command is at most {MAX_COMMAND} characters, none of them NUL", exit=126)
        cap = self.limits.output if output is None else output
        async with self._turn:
            if self._lost is not None:
                raise SandboxLost(self._lost)
            try:
                if self._place is None:
                    self._place = await self._acquire()
                async with time_budget.slot(self._slots):  # waiting for a slot is not the command's time
                    return await self._call(words, folder, stdin, seconds or self.limits.seconds, cap)
            except BaseException as error:
                self._lost = f"the session was lost: {error or type(error).__name__}"
                await self._leave()
                if isinstance(error, OSError | wire.ProtocolError):
                    raise SandboxLost(self._lost) from error
                raise

    async def close(self) -> None:
        """End every process of it; its files are gone."""
        self._lost = self._lost or "the session was closed"
        await self._leave()

    async def _leave(self) -> None:
        slot, self._place = self._place, None
        if slot is not None:
            await slot.leave()

    async def _call(self, words: list[str], folder: str, stdin: bytes, seconds: float, cap: int) -> Ran:
        assert self._place is not None
        child = self._place.child
        self._calls += 1
        header = {"id": self._calls, "argv": words, "folder": folder, "environment": self._environment, "cap": cap}
        reply = child.expect()
        child.send(wire.pack(header, stdin))
        watch = asyncio.ensure_future(self._watch(child, reply, seconds))
        try:
            frame = await reply
        finally:
            watch.cancel()
            await asyncio.wait((watch,))
        why = None if watch.cancelled() else watch.result()
        if len(frame.header) <= SMALL:
            return _read(frame, self._calls, cap, why)
        return await asyncio.to_thread(_read, frame, self._calls, cap, why)

    async def _watch(self, child: Child, reply: "asyncio.Future[wire.WireFrame]", seconds: float) -> str:
        """End the command when its time is up or its processes hold too much; why."""
        loop = asyncio.get_running_loop()
        end, pause = loop.time() + seconds, WATCH_SECONDS
        while True:
            left = end - loop.time()
            if left <= 0:
                why = f"stopped after {seconds:g} s"
                break
            await asyncio.sleep(min(left, pause))
            began, held = loop.time(), 0
            with contextlib.suppress(OSError):  # no descriptor is left to look with; the time limit stands
                held = await asyncio.to_thread(tree_memory, child.pid, self.limits.memory)
            pause = max(WATCH_SECONDS, 5 * (loop.time() - began))
            if held > self.limits.memory:
                why = f"stopped: its processes held more than {self.limits.memory} bytes of memory"
                break
        child.signal(STOP)
        loop.call_later(GRACE_SECONDS, child.give_up_on, reply, "it did not end a command that it was told to end")
        return why


def _read(frame: wire.WireFrame, number: int, cap: int, why: str | None) -> Ran:
    """A reply, checked: it is written by a process as confined as the code that it ran."""
    header = wire.read_header(frame.header)
    output, code, stopped = header.get("output"), header.get("exit"), header.get("stopped")
    if header.get("id") != number or not isinstance(output, str) or not isinstance(stopped, bool):
        raise wire.ProtocolError("an answer to nothing that was asked")
    if isinstance(code, bool) or not isinstance(code, int | None):
        raise wire.ProtocolError("an exit code that is not a number")
    text = clean(cut(output, cap + 100))
    if stopped:
        return Ran(text, None, why or "stopped: it ended itself by the signal that ends commands")
    return Ran(text, code)


class _Processes:
    """Who is whose parent on this machine; commands that run at once share one look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = -1.0
        self._parents: dict[int, int] = {}

    def parents(self) -> dict[int, int]:
        with self._lock:
            if time.monotonic() - self._seen > WATCH_SECONDS / 2:
                self._parents = self._read_parents()
                self._seen = time.monotonic()
            return self._parents

    def _read_parents(self) -> dict[int, int]:
        parents = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended
                    parents[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
        return parents


_PROCESSES = _Processes()


def tree_memory(root: int, most: int) -> int:
    """Bytes that the processes below one hold; who is whose parent is read from /proc.

    What forked processes have in common counts for each of them, unless that is more than `most`: then the kernel is
    asked for their shares, which takes it longer.
    """
    parents = _PROCESSES.parents()
    below: set[int] = set()
    newest = {root}
    while newest := {pid for pid, parent in parents.items() if parent in newest} - below:
        below |= newest
    held = sum(map(_own, below))
    return held if held <= most else sum(map(_share, below))


def _own(pid: int) -> int:
    try:
        _, resident, shared = Path("/proc", str(pid), "statm").read_text().split()[:3]
    except (OSError, ValueError):  # it has ended
        return 0
    return (int(resident) - int(shared)) * _PAGE


def _share(pid: int) -> int:
    try:
        match = re.search(r"^Pss_Anon:\s+(\d+) kB", Path("/proc", str(pid), "smaps_rollup").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:  # not to be asked: what it has in common with others counts fully
        return _own(pid)
    return 0 if match is None else int(match[1]) * 1024

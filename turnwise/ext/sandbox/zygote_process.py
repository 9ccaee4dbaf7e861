"""The zygote that forks sessions, as the host sees it: how it is started, asked for a session, and found to be gone."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from turnwise.errors import MachineryLost, TurnwiseError
from turnwise.ext.sandbox import wire
from turnwise.ext.sandbox.session_process import Child

MAX_MESSAGE = 64 * 1024
INSTALL = "pip install 'turnwise[sandbox]'"
"""What brings the packages that are no part of a plain install."""
INSTALL_VISION = "pip install 'turnwise[vision]'"
ISOLATION_FAILED = 97
START_SECONDS = 120.0
"""For importing the packages, the first time perhaps from a slow disk."""
FORK_SECONDS = 60.0
"""In which a zygote that is asked for sessions says something, of whichever of them."""
END_SECONDS = 5.0
ENDED_FIRST = 1000
"""The kernel's oom_score_adj of what it ends before all else."""
_START = "import sys; root = sys.argv[2]; sys.path.append(root); from turnwise.ext.sandbox.inside.zygote import main; "
_START += "sys.path.remove(root); main(int(sys.argv[1]))"


class SandboxLost(MachineryLost):
    """The machinery that runs code failed, not the code: the call says nothing about it and may be tried again."""


class SandboxUnavailable(TurnwiseError):
    """No sandbox of the wanted level can be had here; the text says what is missing and what would help."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A layer the kernel refused: `Refusal("namespaces", "unshare(NEWUSER)", 1)`."""

    layer: str
    call: str
    errno: int

    def __str__(self) -> str:
        return f"{self.layer}: {self.call}: {os.strerror(self.errno)}" if self.errno else f"{self.layer}: {self.call}"


class LayerRefused(Exception):
    """The zygote or a session could not put on a layer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


T = TypeVar("T")


class Zygote:
    """The zygote's process and the control socket to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket, caps: wire.Caps) -> None:
        self.process = process
        self._caps = caps
        self.landlock = 0
        self.uid = -1
        self.ends_last = end_first(process.pid)
        self.heard = 0.0
        """When it last said something, on the loop's clock."""
        self._control = control
        self._opening: dict[int, asyncio.Future[int]] = {}
        self._children: dict[int, Child] = {}
        self._next = 0
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, orders: dict[str, Any], caps: wire.Caps) -> "Zygote":
        """A zygote that has put on its layers; LayerRefused or SandboxUnavailable when it could not.

        `caps` bound what its sessions answer.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = await asyncio.to_thread(_spawn, theirs.fileno())
        except OSError as error:  # no descriptor, process or memory is left
            raise SandboxUnavailable(f"the sandbox could not be started: {error}") from error
        ours.setblocking(False)
        ours.send(json.dumps(orders).encode())
        zygote = cls(process, ours, caps)
        asyncio.get_running_loop().add_reader(ours.fileno(), zygote._listen)
        try:
            async with asyncio.timeout(START_SECONDS):
                answer = await zygote._ready
            check_ready(answer)
        except TimeoutError as error:
            await zygote.close()
            raise SandboxUnavailable(f"the sandbox did not start within {START_SECONDS:g} s") from error
        except BaseException:
            await zygote.close()
            raise
        zygote.landlock, zygote.uid = answer["ready"]["landlock"], answer["ready"]["uid"]
        return zygote

    async def fork(self, scratch: str, *, rehearse: bool) -> Child:
        """A new session's process, isolated and ready; one made ahead of need has rehearsed its first call."""
        if self.lost.done():
            raise SandboxLost(self.lost.result())
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # no descriptor is left
            raise SandboxLost(f"a new session could not be made: {error}") from error
        ours.setblocking(False)
        number = self._next = self._next + 1
        child = Child(number, ours, self._caps)
        self._children[number] = child
        hello = child.expect()
        opening = self._opening[number] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                request = json.dumps({"open": number, "scratch": scratch, "rehearse": rehearse}).encode()
                socket.send_fds(self._control, [request], [theirs.fileno()])
            child.known_by(await self._opened(opening))
            async with asyncio.timeout(START_SECONDS):
                check_greeting(await hello)
        except wire.ProtocolError as error:
            child.close()
            raise SandboxLost(f"a new sandbox session did not come up: {error}") from error
        except OSError as error:  # TimeoutError is one
            child.close()
            raise SandboxLost(f"the sandbox's parent process does not answer: {error}") from error
        except BaseException:
            child.close()
            raise
        return child

    async def _opened(self, opening: "asyncio.Future[int]") -> int:
        try:
            return await answered(opening, self)
        except TimeoutError:
            self.process.kill()  # it serves nobody any more; the next one who asks starts another
            self._end()
            raise

    def _listen(self) -> None:
        try:
            while True:
                message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
                if not message:
                    return self._end()
                self._take(json.loads(message), descriptors)
        except BlockingIOError:
            return
        except OSError:
            self._end()

    def _take(self, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        self.heard = asyncio.get_running_loop().time()
        if "opened" in message:
            opening = self._opening.pop(message["opened"])
            if not descriptors:  # we have no room for one; the process ends when its socket is closed
                fail(opening, "a new session could not be made: no descriptor is left in this process")
            elif opening.cancelled():
                signal.pidfd_send_signal(descriptors[0], signal.SIGKILL)
                os.close(descriptors[0])
            else:
                opening.set_result(descriptors[0])
        elif "ended" in message:
            self._children.pop(message["ended"]).has_ended(message["status"], message["peak"] * 1024)
        elif "failed" in message:
            self._children.pop(message["failed"]).has_ended(ISOLATION_FAILED, 0)
            opening = self._opening.pop(message["failed"])
            if "refused" not in message:
                fail(opening, f"a new session could not be made: {message['reason']}")
            elif not opening.done():
                opening.set_exception(LayerRefused(Refusal(**message["refused"])))
        elif not self._ready.done():
            self._ready.set_result(message)

    def _end(self) -> None:
        """The zygote is gone, and with it every session."""
        if self._control.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        reason = "the sandbox's parent process ended"
        if not self.lost.done():
            self.lost.set_result(reason)
        for opening in self._opening.values():
            fail(opening, reason)
        fail(self._ready, reason)
        for child in self._children.values():
            child.has_ended(None, 0)
        self._opening.clear()
        self._children.clear()

    async def close(self) -> None:
        """End it and all its sessions; nothing of them is left afterwards."""
        if not self.lost.done():
            self._end()
        try:
            await asyncio.to_thread(self.process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)


class HeardFrom(Protocol):
    """A process that gives signs of life."""

    heard: float


async def answered(waiting: "asyncio.Future[T]", zygote: HeardFrom) -> T:
    """The result; TimeoutError when the zygote has fallen silent. One of a thousand who ask at once may wait long."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    try:
        while True:
            left = max(zygote.heard, start) + FORK_SECONDS - loop.time()
            if left <= 0:
                raise TimeoutError(f"nothing was heard of it for {FORK_SECONDS:g} s")
            done, _ = await asyncio.wait((waiting,), timeout=left)
            if done:
                return waiting.result()
    except BaseException:
        waiting.cancel()  # what comes too late is nobody's
        raise


def check_greeting(frame: wire.WireFrame) -> None:
    """Raise what a new session's first word says it could not put on."""
    header = wire.read_header(frame.header)
    if "refused" in header:
        raise LayerRefused(Refusal(**header["refused"]))


def check_ready(answer: dict[str, Any]) -> None:
    """Raise what a zygote's first answer says it could not do."""
    if "threads" in answer:
        raise SandboxUnavailable(
            f"sandbox.preload: these packages leave {answer['threads']} threads running, and a process with "
            "threads cannot be forked safely: leave out the one that starts them"
        )
    if "missing" in answer:
        raise SandboxUnavailable(
            f"sandbox.preload names {answer['missing']!r}, which cannot be imported here: install it "
            f"({INSTALL} brings pandas, matplotlib and sympy) or leave it out"
        )
    if "refused" in answer:
        raise LayerRefused(Refusal(**answer["refused"]))


def fail(waiting: "asyncio.Future[Any]", reason: str) -> None:
    """Let whoever waits know that the machinery failed."""
    if not waiting.done():
        waiting.set_exception(SandboxLost(reason))
        waiting.exception()  # whoever waited may have stopped


def _spawn(control: int) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).parents[3])
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-B", "-X", "utf8", "-c", _START, str(control), root],
        pass_fds=(control,),
        env=environment(),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_first(pid: int) -> str | None:
    """Have the kernel end this process and those it starts before any other when memory runs out; why not, if not."""
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(ENDED_FIRST))
    except OSError as error:
        return f"the kernel may end this program before its sandboxes when memory runs out: {error}"
    return None


def environment() -> dict[str, str]:
    """Nothing of ours, keys above all; one thread each, because a process with threads cannot be forked safely."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_MAX_THREADS"), "1")
    library = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # Python may need it
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnwise" / "matplotlib"
    return {
        **threads,
        **library,
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "HOME": "/tmp",
        "MALLOC_ARENA_MAX": "2",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pandas loads pyarrow, whose allocator would start one
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": str(cache),  # its list of fonts takes seconds to make
        "JOBLIB_MULTIPROCESSING": "0",  # there are no processes to work in, and joblib would say so each time
        "PYTHONHASHSEED": "0",  # the order of sets is the same when a trajectory is played again
    }


def python_paths() -> tuple[str, ...]:
    """Where Python and its packages lie; a project that is only linked into them does not."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    library = sysconfig.get_config_var("LIBDIR")
    if library:
        folders.append(library)
    return tuple(
        dict.fromkeys(path for folder in folders for path in (folder, os.path.realpath(folder)) if os.path.isdir(path))
    )

"""The host's end of the sandboxed processes: the zygote that forks sessions, and the sockets to them."""

import asyncio
import contextlib
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
from typing import Any

from turnwise.errors import TurnwiseError
from turnwise.sandbox import wire

MAX_MESSAGE = 64 * 1024
ISOLATION_FAILED = 97
CLOSED, ENDED = "the process closed its socket", "the process ended"
"""Why nothing more comes from a process, when it was not we who gave it up."""
REST_SECONDS = 0.005
START_SECONDS = 120.0
"""For importing the packages, the first time perhaps from a slow disk."""
END_SECONDS = 5.0
_START = "import sys; root = sys.argv[2]; sys.path.append(root); from turnwise.sandbox.inside.zygote import main; "
_START += "sys.path.remove(root); main(int(sys.argv[1]))"


class SandboxUnavailable(TurnwiseError):
    """No sandbox of the wanted level can be had here; the text says what is missing and what would help."""


class SandboxLost(Exception):
    """The machinery failed, not the code that ran: the call says nothing about the code and may be tried again."""


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


Frame = tuple[dict[str, Any], memoryview]
"""A header and its blobs."""


class Zygote:
    """The zygote's process and the control socket to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        self.process = process
        self.landlock = 0
        self.uid = -1
        self._control = control
        self._opening: dict[int, asyncio.Future[int]] = {}
        self._children: dict[int, Child] = {}
        self._next = 0
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, orders: dict[str, Any]) -> "Zygote":
        """A zygote that has put on its layers; LayerRefused or SandboxUnavailable when it could not."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = await asyncio.to_thread(_spawn, theirs.fileno())
        ours.setblocking(False)
        ours.send(json.dumps(orders).encode())
        zygote = cls(process, ours)
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

    async def fork(self, scratch: str, *, rehearse: bool) -> "Child":
        """A new session's process, isolated and ready; one made ahead of need has rehearsed its first call."""
        if self.lost.done():
            raise SandboxLost(self.lost.result())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        number = self._next = self._next + 1
        child = Child(number, ours)
        self._children[number] = child
        hello = child.expect()
        opening = self._opening[number] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                request = json.dumps({"open": number, "scratch": scratch, "rehearse": rehearse}).encode()
                socket.send_fds(self._control, [request], [theirs.fileno()])
            child.pidfd = await opening
            header, _ = await hello
            if "refused" in header:
                raise LayerRefused(Refusal(**header["refused"]))
        except wire.ProtocolError as error:
            child.close()
            raise SandboxLost(f"a new session did not come up: {error}") from error
        except OSError as error:
            child.close()
            raise SandboxLost(f"the sandbox's zygote does not answer: {error}") from error
        except BaseException:
            child.close()
            raise
        return child

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
        if "opened" in message:
            opening = self._opening.pop(message["opened"])
            if opening.cancelled():
                signal.pidfd_send_signal(descriptors[0], signal.SIGKILL)
                os.close(descriptors[0])
            else:
                opening.set_result(descriptors[0])
        elif "ended" in message:
            self._children.pop(message["ended"]).has_ended(message["status"], message["peak"] * 1024)
        elif "failed" in message:
            self._children.pop(message["failed"]).has_ended(ISOLATION_FAILED, 0)
            opening = self._opening.pop(message["failed"])
            if not opening.done():
                opening.set_exception(LayerRefused(Refusal(**message["refused"])))
        elif not self._ready.done():
            self._ready.set_result(message)

    def _end(self) -> None:
        """The zygote is gone, and with it every session."""
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        reason = "the sandbox's zygote ended"
        if not self.lost.done():
            self.lost.set_result(reason)
        for opening in self._opening.values():
            _fail(opening, reason)
        _fail(self._ready, reason)
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


class Child:
    """One session's process: frames to it and from it, signals, and how it ended."""

    takes_descriptors = True
    """Whether files can be handed over open; else their content goes with the frame."""

    def __init__(self, number: int, channel: socket.socket) -> None:
        self.number = number
        self.pidfd = -1
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        """The exit status (negative: the signal), or None when the zygote was lost with it."""
        self.peak = 0
        self.broken: str | None = None
        """Why nothing from this process is believed any more."""
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._buffer = bytearray()
        self._waiting: asyncio.Future[Frame] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._stopped = False
        self._loop.add_reader(channel.fileno(), self._readable)

    def expect(self) -> "asyncio.Future[Frame]":
        """The next frame, to be awaited; wire.ProtocolError when none will come. Anything unexpected is a breach."""
        self._waiting = self._loop.create_future()
        if self.broken is not None:
            self._waiting.set_exception(wire.ProtocolError(self.broken))
        return self._waiting

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send, in the background where the socket does not take it at once: a process that does not read must not
        keep us. Whoever waits for the answer has a deadline."""
        try:
            if descriptors:
                sent = socket.send_fds(self._channel, [frame], list(descriptors))
            else:
                sent = self._channel.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it has ended; whoever waits for the answer learns that
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if self._stopped:
            self._stopped = False
            self.signal(signal.SIGCONT)  # after the frame, so that it wakes only once
        if sent < len(frame):
            self._sending = self._loop.create_task(self._send_rest(memoryview(frame)[sent:]))

    async def _send_rest(self, rest: memoryview) -> None:
        with contextlib.suppress(OSError):
            await self._loop.sock_sendall(self._channel, rest)

    def rest(self) -> None:
        """Threads that a call left behind get no time until the next one. Soon, not now: it may come at once."""
        self._resting = self._loop.call_later(REST_SECONDS, self._stop)

    def _stop(self) -> None:
        self._stopped = True
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Kill it; the zygote buries it."""
        self.signal(signal.SIGKILL)
        self._hang_up()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def has_ended(self, status: int | None, peak: int) -> None:
        """The zygote's word, which comes after everything the process wrote."""
        self.peak = peak
        if not self.ended.done():
            self.ended.set_result(status)
        if self._waiting is not None and not self._waiting.done():
            self._readable()
        self.give_up(ENDED)

    def _readable(self) -> None:
        try:
            data = self._channel.recv(1 << 20 if self._buffer else 1 << 16)  # a large buffer is slow to make
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self.give_up(CLOSED)
        self._buffer += data
        if self._waiting is None or self._waiting.done():
            return self.give_up("it wrote without being asked")
        try:
            frame = self._frame()
        except wire.ProtocolError as error:
            return self.give_up(str(error))
        if frame is not None:
            self._waiting.set_result(frame)

    def _frame(self) -> Frame | None:
        """A whole frame, and nothing after it."""
        if len(self._buffer) < wire.PREFIX.size:
            return None
        total, header = wire.lengths(bytes(self._buffer[: wire.PREFIX.size]))
        if len(self._buffer) < wire.PREFIX.size + total:
            return None
        if len(self._buffer) > wire.PREFIX.size + total:
            raise wire.ProtocolError("more than one answer")
        body = memoryview(bytes(self._buffer))[wire.PREFIX.size :]
        self._buffer.clear()
        return wire.read_header(bytes(body[:header])), body[header:]

    def give_up(self, reason: str) -> None:
        """Believe nothing more from it."""
        if self.broken is not None:
            return
        self.broken = reason
        self._hang_up()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(wire.ProtocolError(reason))
            self._waiting.exception()  # whoever waited may have stopped

    def give_up_on(self, reply: "asyncio.Future[Frame]", reason: str) -> None:
        """Unless that reply has come."""
        if not reply.done():
            self.give_up(reason)

    def _hang_up(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
        if self._sending is not None:
            self._sending.cancel()
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()


def check_ready(answer: dict[str, Any]) -> None:
    """Raise what a zygote's first answer says it could not do."""
    if "threads" in answer:
        raise SandboxUnavailable(
            f"sandbox.preload: these packages leave {answer['threads']} threads running, and a process with "
            "threads cannot be forked safely: leave out the one that starts them"
        )
    if "missing" in answer:
        raise SandboxUnavailable(
            f"sandbox.preload names {answer['missing']!r}, which cannot be imported here: install it or leave it out"
        )
    if "refused" in answer:
        raise LayerRefused(Refusal(**answer["refused"]))


def _fail(waiting: "asyncio.Future[Any]", reason: str) -> None:
    if not waiting.done():
        waiting.set_exception(SandboxLost(reason))
        waiting.exception()  # whoever waited may have stopped


def _spawn(control: int) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-B", "-X", "utf8", "-c", _START, str(control), root],
        pass_fds=(control,),
        env=environment(),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


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
        "PYTHONHASHSEED": "0",  # the order of sets is the same when a trajectory is played again
    }


def python_paths() -> tuple[str, ...]:
    """Where Python and its packages lie; a project that is only linked into them does not."""
    known = sysconfig.get_paths()
    found = [known[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    library = sysconfig.get_config_var("LIBDIR")
    if library:
        found.append(library)
    return tuple(dict.fromkeys(path for one in found for path in (one, os.path.realpath(one)) if os.path.isdir(path)))

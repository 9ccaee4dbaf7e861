"""The zygote inside gVisor: another kernel answers its system calls, and all we share with it are sockets."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnwise.ext.sandbox.session_process import Child
from turnwise.ext.sandbox.wire import Caps, ProtocolError
from turnwise.ext.sandbox.zygote_process import (
    END_SECONDS,
    START_SECONDS,
    LayerRefused,
    Refusal,
    SandboxLost,
    SandboxUnavailable,
    answered,
    check_greeting,
    check_ready,
    end_first,
    environment,
    fail,
)

FLAGS = ("--rootless", "--ignore-cgroups", "--network=none", "--host-uds=open", "--platform=ptrace")
"""`ptrace` is the platform that every build has and that works inside virtual machines."""
_START = "import sys; root = sys.argv[2]; sys.path.append(root); from turnwise.ext.sandbox.inside.relay import main; "
_START += "sys.path.remove(root); main(sys.argv[1])"
LINE_LIMIT = 64 * 1024
ACCEPT_SECONDS = 0.1


class GvisorZygote:
    """Behind the interface of process.Zygote."""

    landlock = 0

    def __init__(self, process: "subprocess.Popen[bytes]", listener: socket.socket, path: Path, caps: Caps) -> None:
        self.process = process
        self._caps = caps
        self.uid = -1
        self.ends_last = end_first(process.pid)
        self.heard = 0.0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._listener = listener
        self._path = path
        self._control: asyncio.StreamWriter | None = None
        self._children: dict[int, RelayedChild] = {}
        self._arriving: dict[int, asyncio.Future[socket.socket]] = {}
        self._next = 0
        self._reading: asyncio.Task[None] | None = None
        self._accepting: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, orders: dict[str, Any], caps: Caps, folder: Path) -> "GvisorZygote":
        """A zygote in a gVisor of its own; LayerRefused or SandboxUnavailable when it could not be."""
        runsc = shutil.which("runsc")
        if runsc is None:
            raise LayerRefused(Refusal("gvisor", "there is no runsc", 0))
        path = folder / "socket"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)
        listener.setblocking(False)
        zygote = cls(await asyncio.to_thread(_spawn, runsc, path, folder), listener, path, caps)
        try:
            async with asyncio.timeout(START_SECONDS):
                answer = await zygote._handshake(orders)
            check_ready(answer)
        except TimeoutError as error:
            await zygote.close()
            raise SandboxUnavailable(f"the sandbox in gVisor did not start within {START_SECONDS:g} s") from error
        except BaseException:
            await zygote.close()
            raise
        zygote.uid = answer["ready"]["uid"]
        zygote._accepting = asyncio.ensure_future(zygote._accept())
        return zygote

    async def _handshake(self, orders: dict[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        accepting = asyncio.ensure_future(loop.sock_accept(self._listener))
        ended = asyncio.ensure_future(_ended(self.process))
        done, _ = await asyncio.wait((accepting, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if accepting not in done:
            accepting.cancel()
            raise LayerRefused(Refusal("gvisor", f"runsc ended with status {self.process.returncode}", 0))
        connection, _ = accepting.result()
        reader, self._control = await asyncio.open_connection(sock=connection, limit=LINE_LIMIT)
        await reader.readline()  # it says who it is
        self._send(orders)
        line = await reader.readline()
        if not line:
            raise SandboxLost("the sandbox's parent process ended")
        self._reading = asyncio.ensure_future(self._listen(reader))
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def fork(self, scratch: str, *, rehearse: bool) -> "RelayedChild":
        """A new session's process, isolated and ready."""
        if self.lost.done():
            raise SandboxLost(self.lost.result())
        number = self._next = self._next + 1
        arriving = self._arriving[number] = asyncio.get_running_loop().create_future()
        self._send({"open": number, "scratch": scratch, "rehearse": rehearse})
        try:
            channel = await answered(arriving, self)
        except TimeoutError as error:
            raise SandboxLost(f"the sandbox's parent process does not answer: {error}") from error
        finally:
            self._arriving.pop(number, None)
        child = RelayedChild(number, channel, self._caps, self._send)
        self._children[number] = child
        try:
            async with asyncio.timeout(START_SECONDS):
                check_greeting(await child.expect())
        except (ProtocolError, TimeoutError) as error:
            child.close()
            raise SandboxLost(f"a new sandbox session did not come up: {error or 'it says nothing'}") from error
        except BaseException:
            child.close()
            raise
        return child

    async def close(self) -> None:
        """Ends the zygote and all its sessions."""
        self._end()
        for task in (self._accepting, self._reading):
            if task is not None:
                task.cancel()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        try:
            await asyncio.to_thread(self.process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await asyncio.to_thread(self.process.wait)

    async def _accept(self) -> None:
        """Every further connection is a session's; its first line says which."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is left; whoever waits has a deadline, and later ones may find one
                await asyncio.sleep(ACCEPT_SECONDS)
                continue
            connection.setblocking(False)
            line = b""
            while not line.endswith(b"\n") and len(line) < 100:
                byte = await loop.sock_recv(connection, 1)
                if not byte:
                    break
                line += byte
            number = json.loads(line)["session"] if line.endswith(b"\n") else None
            waiting = None if number is None else self._arriving.get(number)
            if waiting is None or waiting.done():
                connection.close()
            else:
                waiting.set_result(connection)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            self.heard = asyncio.get_running_loop().time()
            if "ended" in message and (child := self._children.pop(message["ended"], None)) is not None:
                child.has_ended(message["status"], message["peak"] * 1024)
            elif "failed" in message and (waiting := self._arriving.get(message["failed"])) is not None:
                fail(waiting, f"a new session could not be made: {message['reason']}")
        self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if not self.lost.done():
            self.lost.set_result("the sandbox's parent process ended")
        for waiting in self._arriving.values():
            fail(waiting, "the sandbox's parent process ended")
        for child in list(self._children.values()):
            child.has_ended(None, 0)
        self._children.clear()

    def _send(self, message: dict[str, Any]) -> None:
        if self._control is not None:
            self._control.write(json.dumps(message).encode() + b"\n")


class RelayedChild(Child):
    """A session whose signals the zygote passes on."""

    takes_descriptors = False

    def __init__(self, number: int, channel: socket.socket, caps: Caps, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(number, channel, caps)
        self._send = send

    def signal(self, number: int) -> None:
        if not self.ended.done():
            self._send({"signal": self.number, "number": int(number)})


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        await asyncio.sleep(0.05)


def _spawn(runsc: str, path: Path, folder: Path) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).parents[3])
    state = folder / "gvisor"
    state.mkdir(mode=0o700, exist_ok=True)
    python = [sys.executable, "-P", "-s", "-B", "-X", "utf8", "-c", _START, str(path), root]
    return subprocess.Popen(
        [runsc, f"--root={state}", *FLAGS, "do", "--quiet", "--cwd=/", *python],
        env=environment(),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )

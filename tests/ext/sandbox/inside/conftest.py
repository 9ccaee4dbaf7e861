"""A session in a forked child, without isolation, and the host's end of its channel."""

import array
import fcntl
import importlib
import json
import os
import resource
import shutil
import signal
import socket
import struct
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import matplotlib.pyplot
import numpy
import pandas
import PIL.Image
import PIL.ImageDraw
import PIL.ImageEnhance
import PIL.ImageOps
import pytest
import sympy

from turnwise.ext.sandbox.inside.worker import Settings, prepare, serve

LOADED = (matplotlib.pyplot, numpy, pandas, PIL.Image, PIL.ImageDraw, PIL.ImageEnhance, PIL.ImageOps, sympy)
PREFIX = struct.Struct("!II")
NOBODY = 65534


class Host:
    """The other end: sends requests, reads replies."""

    def __init__(self, channel: socket.socket, pid: int, scratch: str) -> None:
        self.channel, self.pid, self.scratch = channel, pid, scratch
        self.count = 0
        self.blobs: list[bytes] = []

    def send(self, code: str, images: list[tuple[str, bytes, str | None, Any]] = (), inband: bool = False, **more: Any):
        self.count += 1
        header = {"id": self.count, "code": code, **more}
        if images:
            header["images"] = [{"name": n, "mode": m, "size": s, "length": len(d)} for n, d, m, s in images]
            header["inband"] = inband
        blobs = b"".join(data for _, data, _, _ in images) if inband else b""
        encoded = json.dumps(header).encode()
        frame = PREFIX.pack(len(encoded) + len(blobs), len(encoded)) + encoded + blobs
        if not images or inband:
            self.channel.sendall(frame)
            return
        numbers = []
        for _, data, _, _ in images:
            number = os.memfd_create("image", os.MFD_ALLOW_SEALING)
            os.write(number, data)
            fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            numbers.append(number)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]
        sent = self.channel.sendmsg([frame], rights)
        self.channel.sendall(frame[sent:])
        for number in numbers:
            os.close(number)

    def receive(self) -> dict[str, Any]:
        total, size = PREFIX.unpack(self.exactly(PREFIX.size))
        reply = json.loads(self.exactly(size))
        data = self.exactly(total - size)
        self.blobs = []
        for image in reply["images"]:
            self.blobs.append(data[: image["length"]])
            data = data[image["length"] :]
        assert data == b""
        assert reply["id"] == self.count
        return reply

    def exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.channel.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def run(self, code: str, *images: tuple[str, bytes, str | None, Any], **more: Any) -> dict[str, Any]:
        self.send(code, list(images), **more)
        return self.receive()

    def pictures(self, reply: dict[str, Any]) -> list[Any]:
        return [
            PIL.Image.frombytes(image["mode"], tuple(image["size"]), blob)
            for image, blob in zip(reply["images"], self.blobs, strict=True)
        ]


def descriptors_of_session(scratch: str) -> None:
    """As the isolation leaves them: nothing to read, and a memory file of a fixed size to write to."""
    raw = os.memfd_create("output", os.MFD_ALLOW_SEALING)
    os.ftruncate(raw, 65536)
    fcntl.fcntl(raw, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(raw, 1)
    os.dup2(raw, 2)
    os.chdir(scratch)


def become_session(order: dict[str, Any], channel: int) -> None:
    """In the forked child; does not return."""
    try:
        descriptors_of_session(order["scratch"])
        if "memory" in order:
            with open("/proc/self/statm") as file:
                base = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (base + order["memory"],) * 2)
        if order["ordinary"] and os.getuid() == 0:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        settings = {"output": 1000, "images": 8, "pixels": 1_000_000, "scratch": order["scratch"], **order["limits"]}
        serve(socket.socket(fileno=channel), Settings(**settings))
    except BaseException:
        with open("crash.txt", "w") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(1)


class Zygote:
    """A process with the packages loaded and changed, so that the tests' own process stays as it is."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(60)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.control.close()
                self.serve(theirs)
            finally:
                os._exit(1)
        theirs.close()

    def serve(self, control: socket.socket) -> None:
        importlib.reload(warnings)  # pytest collects them
        prepare([])
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            message, numbers, _, _ = socket.recv_fds(control, 65536, 1)
            if not message:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                control.close()
                become_session(json.loads(message), numbers[0])
            os.close(numbers[0])
            control.send(str(pid).encode())

    def start(self, scratch: str, memory: int | None = None, ordinary: bool = False, **limits: int) -> Host:
        """Fork a session; an ordinary user may not be able to import what root has installed, but is refused files."""
        if os.getuid() == 0:
            os.chown(scratch, NOBODY, NOBODY)
        ours, theirs = socket.socketpair()
        ours.settimeout(60)
        order = {
            "scratch": scratch,
            "ordinary": ordinary,
            "limits": limits,
            **({} if memory is None else {"memory": memory}),
        }
        socket.send_fds(self.control, [json.dumps(order).encode()], [theirs.fileno()])
        theirs.close()
        return Host(ours, int(self.control.recv(100)), scratch)


def stop(host: Host) -> None:
    host.channel.close()
    with suppress(ProcessLookupError):
        os.kill(host.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.control.close()
    os.waitpid(process.pid, 0)


@pytest.fixture
def scratch() -> Iterator[str]:
    folder = tempfile.mkdtemp()  # pytest's own folders are closed to other users
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def session_with(zygote: Zygote, scratch: str) -> Iterator[Any]:
    """Starts a session with other limits."""
    running: list[Host] = []

    def begin(**options: Any) -> Host:
        running.append(zygote.start(scratch, **options))
        return running[-1]

    yield begin
    for session in running:
        stop(session)


@pytest.fixture
def attach() -> type[Host]:
    """The host's end of a session that a test starts itself."""
    return Host


@pytest.fixture
def host(session_with: Any) -> Host:
    started: Host = session_with()
    return started

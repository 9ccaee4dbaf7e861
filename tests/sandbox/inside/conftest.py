"""A session in a forked child, without isolation, and the host's end of its channel."""

import array
import fcntl
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy
import pandas
import PIL.Image
import PIL.ImageDraw
import PIL.ImageEnhance
import PIL.ImageOps
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot  # noqa: E402

from turnwise.sandbox.inside.worker import Settings, prepare, serve  # noqa: E402

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


def start(scratch: str, drop: bool = True, before: Any = None, **limits: int) -> Host:
    """Fork a session."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    if drop and os.getuid() == 0:
        os.chown(scratch, NOBODY, NOBODY)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ours.close()
            raw = os.memfd_create("output", os.MFD_ALLOW_SEALING)
            os.ftruncate(raw, 65536)
            fcntl.fcntl(raw, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(raw, 1)
            os.dup2(raw, 2)
            os.chdir(scratch)
            if drop and os.getuid() == 0:
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            if before is not None:
                before()
            prepare([])
            serve(theirs, Settings(**{"output": 1000, "images": 8, "pixels": 1_000_000, "scratch": scratch, **limits}))
        except BaseException:
            import traceback

            with open("crash.txt", "w") as file:
                traceback.print_exc(file=file)
        finally:
            os._exit(status)
    theirs.close()
    return Host(ours, pid, scratch)


def stop(host: Host) -> None:
    host.channel.close()
    os.kill(host.pid, signal.SIGKILL)
    os.waitpid(host.pid, 0)


@pytest.fixture
def scratch() -> Iterator[str]:
    import shutil
    import tempfile

    folder = tempfile.mkdtemp()  # pytest's own folders are closed to other users
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def host(scratch: str) -> Iterator[Host]:
    session = start(scratch)
    yield session
    stop(session)


@pytest.fixture
def session_with(scratch: str) -> Iterator[Any]:
    """Starts a session with other limits."""
    running: list[Host] = []

    def begin(**options: Any) -> Host:
        running.append(start(scratch, **options))
        return running[-1]

    yield begin
    for session in running:
        stop(session)


__all__ = ["numpy", "pandas"]

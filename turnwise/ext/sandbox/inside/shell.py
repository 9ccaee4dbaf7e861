"""The first process of a shell session: runs one command at a time in processes of their own, and ends what is left.

It is as confined as the commands are, and none of them can reach its memory: they may neither trace nor read it, and
there is no /proc. Whatever a command leaves running ends with it.

    host --> {"id": n, "argv": [...], "folder": path, "environment": {...}, "cap": bytes} and what the command reads
    here --> {"id": n, "exit": code or null, "stopped": bool, "output": text}
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from typing import Any, NoReturn

from turnwise.ext.sandbox import wire
from turnwise.ext.sandbox.inside.capture import ByteStream, HeadTail

STOP = signal.SIGUSR1
"""From the host: end the command. From a command: it ends itself."""
PIECE = 65536
BURIAL_SECONDS = 5.0


class _Stop:
    """Whether the host said stop since the command began; its signal wakes the loop."""

    def __init__(self) -> None:
        self.asked = False
        self.wake, self.woken = os.pipe()
        for descriptor in (self.wake, self.woken):
            os.set_blocking(descriptor, False)
        # The kernel keeps from a first process what it has no handler for; for this one Python has. An ignored signal
        # would be ignored by every command too.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGCHLD, self._ring)
        signal.signal(STOP, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True
        self._ring()

    def _ring(self, *_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self.woken, b"x")

    def quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, PIECE):
                pass


def serve(channel: socket.socket) -> NoReturn:
    """Answer requests until the host closes the channel; every process here ends with this one."""
    stop = _Stop()
    while True:
        request = _read(channel)
        if request is None:
            os._exit(0)
        header, stdin = request
        channel.sendall(wire.pack(_answer(header, stdin, stop)))


def _read(channel: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    prefix = _exactly(channel, wire.PREFIX.size)
    if prefix is None:
        return None
    total, header = wire.lengths(prefix, wire.REQUESTS)
    body = _exactly(channel, total)
    return None if body is None else (wire.read_header(body[:header]), body[header:])


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _answer(header: dict[str, Any], stdin: bytes, stop: _Stop) -> dict[str, Any]:
    stop.asked = False
    output = HeadTail(header["cap"])
    try:
        command = subprocess.Popen(
            header["argv"], cwd=header["folder"], env=header["environment"], start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return {"id": header["id"], "exit": 127, "stopped": False, "output": f"cannot be started: {error}"}
    try:
        code = _follow(command, stdin, ByteStream(output, 1), stop)
    finally:
        _end_all()
    stopped = stop.asked
    assert command.stdout is not None
    with command.stdout, contextlib.suppress(OSError):  # what it had written; the end is sure, nobody is left to write
        while piece := os.read(command.stdout.fileno(), PIECE):
            output.write(piece.decode("utf-8", "backslashreplace"))
    return {"id": header["id"], "exit": code, "stopped": stopped, "output": output.text()}


def _follow(command: "subprocess.Popen[bytes]", stdin: bytes, output: ByteStream, stop: _Stop) -> int | None:
    """Feed and read until the command itself has ended or must; its exit code, or None."""
    assert command.stdin is not None and command.stdout is not None
    rest = memoryview(stdin)
    for stream in (command.stdin, command.stdout):
        os.set_blocking(stream.fileno(), False)
    with selectors.DefaultSelector() as watching, command.stdin as source:
        watching.register(stop.wake, selectors.EVENT_READ)
        watching.register(command.stdout, selectors.EVENT_READ)
        if rest:
            watching.register(source, selectors.EVENT_WRITE)
        else:
            source.close()
        while not stop.asked and command.poll() is None:
            for key, _ in watching.select():
                if key.fileobj == stop.wake:
                    stop.quiet()
                elif key.fileobj is source:
                    rest = _feed(source, rest)
                    if not rest:
                        watching.unregister(source)
                        source.close()
                elif (piece := _some(command.stdout.fileno())) is None:
                    watching.unregister(command.stdout)
                else:
                    output.write(piece)
        return None if stop.asked else command.returncode


def _feed(source: Any, rest: memoryview) -> memoryview:
    try:
        return rest[os.write(source.fileno(), rest[:PIECE]) :]
    except BlockingIOError:
        return rest
    except BrokenPipeError:  # it does not read
        return rest[:0]


def _some(descriptor: int) -> bytes | None:
    """What is there; None at the end."""
    try:
        return os.read(descriptor, PIECE) or None
    except BlockingIOError:
        return b""


def _end_all() -> None:
    """Kill everything here but ourselves, as often as it takes: a process may be forked meanwhile."""
    end = time.monotonic() + BURIAL_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
    os._exit(1)  # the kernel then ends them with us

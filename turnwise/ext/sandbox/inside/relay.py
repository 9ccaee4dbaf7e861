"""The zygote inside gVisor, where no descriptor can be handed over and no process be signalled from outside.

It connects to a socket of the host, once for itself and once for every session, and passes signals on. Messages are
lines of JSON:

    host --> zygote: the orders, then {"open": n, "scratch": path, "rehearse": bool} and {"signal": n, "number": s}
    zygote --> host: {"ready": ...} or what went wrong, then {"opened": n} or {"failed": n, "reason": ...},
        {"ended": n, "status": ..., "peak": ...}

A session's own connection begins with a line {"session": n}.
"""

import contextlib
import json
import os
import platform
import select
import signal
import socket
from dataclasses import dataclass, field
from typing import Any, NoReturn

from turnwise.ext.sandbox.inside import isolate, syscalls, zygote


def main(path: str) -> NoReturn:
    """What the host has gVisor execute; `path` is the host's socket."""
    control = _connect(path)
    reader = control.makefile("rb")
    _send(control, {"control": os.getpid()})
    try:
        orders = zygote.Orders.read(json.loads(reader.readline()))
        base_memory = zygote.preload(orders.preload)
        isolate.enter_gvisor(orders.plan)
        ground = isolate.prepare_ground(orders.plan, base_memory, platform.machine())
    except (isolate.LayerError, zygote.Threads, ImportError) as error:
        _send(control, zygote.complaint(error))
        os._exit(0)
    _send(control, {"ready": {"landlock": 0, "uid": isolate.PRIVATE_ID}})
    _Relay(path, control, ground, orders).serve()


@dataclass(slots=True)
class _Relay:
    path: str
    control: socket.socket
    ground: isolate.Ground
    orders: zygote.Orders
    pids: dict[int, int] = field(default_factory=dict)
    """The host's number of a session by its pid."""

    def serve(self) -> NoReturn:
        wake, woken = os.pipe()
        for descriptor in (wake, woken):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self.control.setblocking(False)
        poll, rest = select.poll(), b""
        poll.register(wake, select.POLLIN)
        poll.register(self.control.fileno(), select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                    self._reap()
                    continue
                with contextlib.suppress(BlockingIOError):
                    data = self.control.recv(65536)
                    if not data:
                        os._exit(0)  # the host let go; everything here ends with us
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))

    def _obey(self, message: dict[str, Any]) -> None:
        if "signal" in message:
            for pid, number in self.pids.items():
                if number == message["signal"]:
                    os.kill(pid, message["number"])
            return
        try:
            channel = _connect(self.path)
            _send(channel, {"session": message["open"]})
            syscalls.unshare(syscalls.CLONE_NEWPID, "NEWPID")
            child = os.fork()
        except OSError as error:  # no descriptor or no process is left: this one session fails, not all
            return self._report({"failed": message["open"], "reason": f"{error.strerror} in the zygote"})
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            zygote.become_session(self.ground, self.orders.settings, channel.detach(), message)
        channel.close()
        self.pids[child] = message["open"]
        self._report({"opened": message["open"]})

    def _reap(self) -> None:
        while self.pids:
            child, status, usage = os.wait4(-1, os.WNOHANG)
            if child == 0:
                return
            ended = {"status": os.waitstatus_to_exitcode(status), "peak": usage.ru_maxrss}
            self._report({"ended": self.pids.pop(child), **ended})

    def _report(self, message: dict[str, Any]) -> None:
        self.control.setblocking(True)
        _send(self.control, message)
        self.control.setblocking(False)


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)

"""The zygote: a clean process with the packages loaded, which forks an isolated session whenever the host asks.

It is started by `exec`, never forked from the host, so that nothing of the host's memory or environment is in it. It
runs no untrusted code. It ends when the host does.

    host --SEQPACKET--> zygote: {"open": n, "scratch": path, "rehearse": bool} with the session's end of a socket
    zygote --> host: {"ready": ...} or {"refused": ...} once, then {"opened": n} with a pidfd, {"failed": n, ...},
        {"ended": n, ...}
"""

import gc
import importlib
import json
import os
import platform
import select
import signal
import socket
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NoReturn, cast

from turnwise.ext.sandbox import wire
from turnwise.ext.sandbox.inside import isolate, shell, syscalls, worker

MAX_MESSAGE = 64 * 1024
ISOLATION_FAILED = 97


class Threads(Exception):
    """The packages left threads running."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} threads")
        self.count = count


@dataclass(frozen=True, slots=True)
class Orders:
    """The first message: what to load and what to put on."""

    plan: isolate.IsolationPlan
    preload: list[str]
    settings: worker.Settings
    private: bool
    """Root gives up its uid even without namespaces."""

    @classmethod
    def read(cls, message: dict[str, Any]) -> "Orders":
        plan = dict(message["plan"])
        plan["readable"] = tuple(plan["readable"])
        settings = worker.Settings(**message["settings"])
        return cls(isolate.IsolationPlan(**plan), message["preload"], settings, message["private"])


def main(control_descriptor: int) -> NoReturn:
    """The zygote's entry point: isolates itself, then forks a session for each request of the host."""
    control = socket.socket(fileno=control_descriptor)
    # Not the lifeline of system/children.py: nothing of turnwise is in here, and forks of the host may hold a pipe.
    host = os.pidfd_open(os.getppid())
    message = control.recv(MAX_MESSAGE)
    if not message:
        os._exit(0)  # the host let go
    try:
        orders = Orders.read(json.loads(message))
        base_memory = preload(orders.preload)
        if orders.plan.namespaces:
            isolate.enter_namespaces(orders.plan)
            _continue_as_first_process()
        elif orders.private:
            isolate.become_private()
        ground = isolate.prepare_ground(orders.plan, base_memory, platform.machine())
    except (isolate.LayerError, Threads, ImportError) as error:
        _send(control, complaint(error))
        os._exit(0)
    _send(control, {"ready": {"landlock": ground.landlock, "uid": os.geteuid()}})
    _Zygote(control, host, ground, orders.settings).serve()


def _continue_as_first_process() -> None:
    """Fork into the new pid namespace; the parent only waits, so that the host sees our end."""
    child = os.fork()
    if child:
        syscalls.close_from(3)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, "PDEATHSIG")


@dataclass(slots=True)
class _Zygote:
    """Forks sessions, and tells the host when one has ended and how."""

    control: socket.socket
    host: int
    ground: isolate.Ground
    settings: worker.Settings
    numbers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By pidfd: the host's number of the session, and its pid."""
    poll: select.epoll = field(default_factory=select.epoll)

    def serve(self) -> NoReturn:
        self.poll.register(self.control.fileno(), select.EPOLLIN)
        self.poll.register(self.host, select.EPOLLIN)
        # setns with a descriptor of ourselves leads back from the namespace made for the last session.
        itself = os.pidfd_open(os.getpid())
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.host:
                    os._exit(0)
                elif descriptor == self.control.fileno():
                    self._listen(itself)
                else:
                    self._reap(descriptor)

    def _listen(self, itself: int) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, 1)
        except ConnectionResetError:
            os._exit(0)
        if not message:
            os._exit(0)  # the host let go; everything here ends with us
        request = json.loads(message)
        if not descriptors:  # we have no room for one
            return self._fail(request, {"reason": "no descriptor is left in the zygote"})
        try:
            child = self._fork(itself)
        except isolate.LayerError as error:
            os.close(descriptors[0])
            return self._fail(request, {"refused": _refusal(error)})
        if child == 0:
            become_session(self.ground, self.settings, descriptors[0], request)
        os.close(descriptors[0])
        pidfd = -1
        try:
            pidfd = os.pidfd_open(child)
            self.poll.register(pidfd, select.EPOLLIN)
            _send(self.control, {"opened": request["open"]}, pidfd)
        except OSError as error:  # too many descriptors, open or on their way: this one session fails, not all
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if pidfd >= 0:
                os.close(pidfd)  # which takes it out of the poll
            return self._fail(request, {"reason": f"{error.strerror} in the zygote"})
        self.numbers[pidfd] = (request["open"], child)

    def _fail(self, request: dict[str, Any], why: dict[str, Any]) -> None:
        _send(self.control, {"failed": request["open"], **why})

    def _fork(self, itself: int) -> int:
        if self.ground.plan.namespaces:
            with isolate.layer("namespaces"):
                syscalls.setns(itself, syscalls.CLONE_NEWPID)
                syscalls.unshare(syscalls.CLONE_NEWPID, "NEWPID")
        with isolate.layer("processes"):
            return os.fork()

    def _reap(self, pidfd: int) -> None:
        number, child = self.numbers.pop(pidfd)
        self.poll.unregister(pidfd)
        os.close(pidfd)
        _, status, usage = os.wait4(child, 0)
        _send(self.control, {"ended": number, "status": os.waitstatus_to_exitcode(status), "peak": usage.ru_maxrss})


def become_session(
    ground: isolate.Ground, settings: worker.Settings, channel: int, request: dict[str, Any]
) -> NoReturn:
    """In the forked child. Nothing the zygote held is left when untrusted code runs."""
    scratch = request["scratch"]
    os.dup2(channel, isolate.CHANNEL, inheritable=False)
    connection = socket.socket(fileno=isolate.CHANNEL)
    try:
        with isolate.layer("session"):
            isolate.isolate(ground, scratch)
    except isolate.LayerError as error:
        connection.sendall(wire.pack({"id": 0, "refused": _refusal(error)}))
        os._exit(ISOLATION_FAILED)
    os.environ["HOME"] = os.environ["TMPDIR"] = scratch
    if ground.plan.programs:
        connection.sendall(wire.pack({"id": 0, "ready": True}))
        shell.serve(connection)
    settings = replace(settings, scratch=scratch)
    if request["rehearse"]:
        worker.rehearse(settings)
    connection.sendall(wire.pack({"id": 0, "ready": True}))
    worker.serve(connection, settings)


def complaint(error: isolate.LayerError | Threads | ImportError) -> dict[str, Any]:
    """What the host is told when the zygote cannot serve."""
    match error:
        case isolate.LayerError():
            return {"refused": _refusal(error)}
        case Threads():
            return {"threads": error.count}
        case ImportError():
            return {"missing": error.name or str(error)}


def _refusal(error: isolate.LayerError) -> dict[str, Any]:
    return {"layer": error.layer, "call": error.call, "errno": error.number}


def preload(packages: list[str]) -> int:
    """Load what sessions shall have; the bytes of address space that takes."""
    variables = dict(os.environ)
    # pandas would load pyarrow where it finds it: a third of all memory, which every fork has to pass on.
    spared = "pyarrow" not in sys.modules and "pyarrow" not in packages
    if spared:
        sys.modules["pyarrow"] = cast(ModuleType, None)
    for name in packages:
        importlib.import_module(name)
    if spared:
        del sys.modules["pyarrow"]  # code may still import it for itself
    worker.prepare(packages)
    for name in {*os.environ} - {*variables}:  # OpenCV and scikit-learn set some, with paths of the host
        del os.environ[name]
    os.environ |= variables
    os.environ.pop("MPLCONFIGDIR", None)  # its list of fonts is loaded; the path is the host's
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise Threads(threads - 1)
    gc.collect()
    gc.freeze()  # or collections in the sessions would copy every page of the packages
    syscalls.use_huge_pages()
    return int(_read("/proc/self/statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _send(control: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    """Tell the host, or end with it."""
    encoded = json.dumps(message).encode()
    try:
        if descriptors:
            socket.send_fds(control, [encoded], list(descriptors))
        else:
            control.send(encoded)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)

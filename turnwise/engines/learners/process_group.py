"""The processes of this machine that a learner runs in: started here, asked together, and watched while they work."""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn

from turnwise.engines.learners.watching import BEAT_SECONDS, Beat, HangWatch, beat
from turnwise.errors import EngineError, TurnwiseError, one_line
from turnwise.system import children
from turnwise.system.folders import OwnFolder

GRACE_SECONDS = 10.0
"""When one process has failed, how long the others may take to answer: they may wait for it for ever."""
END_SECONDS = 5.0
LOG_TAIL = 400
"""Characters of a dead process's output that an error repeats."""
AT_ONCE = 2**15
"""Bytes of a call that a socket takes without anybody reading them."""
_BROKEN_GROUP = ("DistBackendError", "DistNetworkError", "DistStoreError")
"""What collectives raise whose other side is gone; gloo's are plain RuntimeErrors that name its transport."""

_START = """
import sys
from multiprocessing.connection import Connection
channel = Connection(int(sys.argv[1]))
sys.path[:] = channel.recv()
from turnwise.engines.learners.process_group import serve
serve(channel, sys.argv[2])
"""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class LearnerLost(EngineError):
    """A process of the learner is gone, and with it the state of all: the run goes on from its last checkpoint."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer of a process whose method raised."""

    error: TurnwiseError | None
    text: str
    """The trace of anything else: a bug."""

    def throw(self, name: str) -> NoReturn:
        """Raises the error of the process with this name again in the one that asked."""
        if self.error is not None:
            raise self.error
        raise RuntimeError(f"{name}: {self.text}")


def raise_first(answers: Sequence[Any], names: Sequence[str]) -> LearnerLost | None:
    """The first error of any process is raised; given back where it tore the group, which is to be ended first."""
    errors = [(name, answer) for name, answer in zip(names, answers, strict=True) if isinstance(answer, Failed)]
    for name, answer in errors:
        if not isinstance(answer.error, LearnerLost):  # a cause: those who waited for it lost touch
            answer.throw(name)
    return next((answer.error for _, answer in errors if isinstance(answer.error, LearnerLost)), None)


class ProcessGroup:
    """Fresh interpreters, one for each name; each opens a `host` (`module:Class`) and answers calls of its methods.

    A process gets `threads` of the CPU, these variables where the environment does not have them, and inherits the
    descriptors `keeps`. When none comes further in `hang_seconds`, they hang.
    """

    def __init__(
        self,
        host: str,
        names: Sequence[str],
        threads: int = 1,
        hang_seconds: float = 1800.0,
        *,
        variables: Mapping[str, str] | None = None,
        keeps: Sequence[int] = (),
    ) -> None:
        self._host, self._names, self._threads = host, tuple(names), max(1, threads)
        self._variables, self._keeps = variables or {}, tuple(keeps)
        self._lock = threading.Lock()
        self._processes: list[children.Process] = []
        self._channels: list[Connection] = []
        self._senders: list[threading.Thread] = []
        self._folder = Path()
        self._limit = hang_seconds
        self._gone: str | None = "they were not started"

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self._names)

    def begin(self) -> None:
        """Start the processes if they do not run yet."""
        if self._processes:
            return
        own = OwnFolder("turnwise-processes-")
        self._folder = own.path
        self._end = weakref.finalize(self, _end, self._processes, self._channels, self._senders, own)
        self._gone = None
        for number in range(self.size):
            self._spawn(number)
            self._channels[number].send([os.path.abspath(entry) for entry in sys.path])

    def _spawn(self, number: int) -> None:
        ours, theirs = connection.Pipe()
        with theirs, self._log(number).open("wb") as log:
            threads = dict.fromkeys(_THREADS, str(self._threads))
            process = children.start(
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), str(self._folder)],
                pass_fds=(theirs.fileno(), *self._keeps),
                env={**self._variables, **os.environ, **threads, "TOKENIZERS_PARALLELISM": "false"},
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        self._channels.append(ours)

    def _log(self, number: int) -> Path:
        return self._folder / f"process_{number}.log"

    def open(self, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Open the host in every process, with a tuple of arguments for each, in the stead of one that is there."""
        return self._ask("open", [(self._host, *call) for call in arguments], grace=0.0)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every host at once, with a tuple of arguments for each; the answers in order.

        The error of a process is raised here, the first one's where several have one. LearnerLost when one died or
        hangs; all are ended then, and so they are when the others do not come back from an error of one. One call at a
        time: others wait.
        """
        return self._ask(method, arguments, GRACE_SECONDS)

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]], grace: float) -> list[Any]:
        with self._lock:
            if self._gone is not None:
                raise LearnerLost(f"the learner's processes are gone: {self._gone}")
            self._senders[:] = [sender for sender in self._senders if sender.is_alive()]
            for number, call_arguments in enumerate(arguments):
                self._send(number, method, ForkingPickler.dumps((method, call_arguments)))
            return self._answers(method, grace)

    def _send(self, number: int, method: str, call: Any) -> None:
        """A process that is stopped reads nothing: what it does not take at once waits in a thread of its own."""
        channel = self._channels[number]
        if call.nbytes > AT_ONCE:
            sender = threading.Thread(target=_sent, args=(channel, call), daemon=True)
            self._senders.append(sender)
            sender.start()
        elif not _sent(channel, call):
            self._lost(number, method)

    def _answers(self, method: str, grace: float) -> list[Any]:
        answers: dict[int, Any] = {}
        waiting = {channel: number for number, channel in enumerate(self._channels)}
        watch, failed, deadline = HangWatch(self._names, self._limit), -1, float("inf")
        while waiting:
            left = min(BEAT_SECONDS, self._limit, max(0.0, deadline - time.monotonic()))
            ready = [channel for channel in connection.wait(list(waiting), left) if isinstance(channel, Connection)]
            if not ready and time.monotonic() >= deadline:  # the others hang in a collective that a failed one left
                self._stop(f"{self._names[failed]} failed in `{method}`")
                answers[failed].throw(self._names[failed])
            for channel in ready:
                number = waiting[channel]
                try:
                    reply = channel.recv()
                except (EOFError, OSError):
                    self._lost(number, method)
                watch.note(number, reply if isinstance(reply, Beat) else None)
                if isinstance(reply, Beat):
                    continue
                answers[number] = reply
                del waiting[channel]
                if isinstance(reply, Failed) and failed < 0:
                    failed, deadline = number, time.monotonic() + grace
            heard = not connection.wait(list(waiting), 0)  # all that was said while this process was stopped itself
            if heard and (problem := watch.hangs(sorted(waiting.values()))) is not None:
                self._stop(problem)
                raise LearnerLost(f"the learner hangs in `{method}` and is ended: {problem}")
        results = [answers[number] for number in range(self.size)]
        if (torn := raise_first(results, self._names)) is not None:
            self._stop(str(torn))
            raise torn
        return results

    def _lost(self, number: int, method: str) -> NoReturn:
        process = self._processes[number]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        words = self._last_words(number)
        status = children.exit_words(process.returncode)
        problem = f"{self._names[number]} (process {process.pid}) died in `{method}`: {status}"
        self._stop(problem)
        ending = f"; it said: {words}" if words else ""
        raise LearnerLost(f"the learner lost a process and with it its state: {problem}{ending}")

    def _last_words(self, number: int) -> str:
        try:
            text = self._log(number).read_bytes()[-4 * LOG_TAIL :].decode(errors="replace")
        except OSError:
            return ""
        return " ".join(text.split())[-LOG_TAIL:]

    def stop(self) -> None:
        """End all processes, whatever they are doing; what waits for them fails."""
        self._stop("they were ended")

    def _stop(self, why: str) -> None:
        if self._gone is None:
            self._gone = why
            self._end()


def _sent(channel: Connection, call: Any) -> bool:
    """Whether the process took it; who reads its answers hears how it ended."""
    try:
        channel.send_bytes(call)
    except OSError:
        return False
    return True


def _end(
    processes: list[children.Process], channels: list[Connection], senders: list[threading.Thread], own: OwnFolder
) -> None:
    """A process may hang in a collective or write a file that nobody will read: there is nothing to wait for."""
    for process in processes:
        children.kill(process)
    for sender in senders:  # whoever read its other end is dead
        sender.join(END_SECONDS)
    for channel in channels:
        channel.close()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        children.cut(process)
    own.remove()


# --- in the process -------------------------------------------------------------------------------------------------


def serve(channel: Connection, folder: str) -> None:
    """Open the host that is asked for and answer calls until the driver is gone; an error is an answer too."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when its processes end
        signal.signal(number, signal.SIG_IGN)
    children.when_parent_ends(partial(_leave, folder))  # even in the middle of a collective
    hosts: list[Any] = []
    answering = _Answering(channel)
    while True:
        try:
            method, arguments = channel.recv()
        except (EOFError, OSError):
            _leave(folder)
        answering.answer(partial(_open, hosts) if method == "open" else getattr(hosts[0], method), arguments)


def _open(hosts: list[Any], spec: str, *arguments: Any) -> None:
    for before in hosts:
        before.leave()
    module, _, name = spec.partition(":")
    hosts[:] = [getattr(import_module(module), name)(*arguments)]


class _Answering:
    """What goes back to the driver: answers, and signs of life from another thread while it waits for one."""

    def __init__(self, channel: Connection) -> None:
        self._channel, self._lock, self._busy = channel, threading.Lock(), threading.Event()
        threading.Thread(target=self._beat, args=(threading.get_ident(),), daemon=True).start()

    def answer(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Work, and send what came of it."""
        self._busy.set()
        try:
            result = work(*arguments)
        except Exception as error:  # it is raised in the other process
            result = failed(error)
        with self._lock, contextlib.suppress(OSError):  # nobody is there any more: the next look at the channel sees it
            self._busy.clear()
            self._channel.send(result)

    def _beat(self, worker: int) -> None:
        while self._busy.wait():
            time.sleep(BEAT_SECONDS)
            with self._lock, contextlib.suppress(OSError):
                if self._busy.is_set():  # else the driver does not listen
                    self._channel.send(beat(worker))


def failed(error: Exception) -> Failed:
    """An error as it travels: one that a person can mend as it is, a torn group as LearnerLost, a bug by its trace."""
    if isinstance(error, RuntimeError) and (type(error).__name__ in _BROKEN_GROUP or "gloo/transport" in str(error)):
        return Failed(LearnerLost(f"a rank lost touch with the others: {one_line(error)[:LOG_TAIL]}"), "")
    if not isinstance(error, TurnwiseError):
        return Failed(None, "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error class of a user's plug-in may not travel: its text does
        error = EngineError(str(error))
    return Failed(error, "")


def _leave(folder: str) -> NoReturn:
    """Without waiting for anything: threads of collectives may hang."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)

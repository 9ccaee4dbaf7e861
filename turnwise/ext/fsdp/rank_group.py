"""The processes that a sharded learner runs in: started here, asked together, and watched while they work."""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from turnwise.errors import EngineError, TurnwiseError, one_line
from turnwise.ext.fsdp.rank_setup import RankPlace, RankSetup
from turnwise.ext.fsdp.rank_watch import BEAT_SECONDS, Beat, RankWatch, beat
from turnwise.system import children
from turnwise.system.folders import OwnFolder

if TYPE_CHECKING:
    from turnwise.ext.fsdp.rank import Rank

GRACE_SECONDS = 10.0
"""When one rank has failed, how long the others may take to answer: they may wait for it in a collective for ever."""
END_SECONDS = 5.0
LOG_TAIL = 400
"""Characters of a dead rank's output that an error repeats."""
_BROKEN_GROUP = ("DistBackendError", "DistNetworkError", "DistStoreError")
"""What collectives raise whose other side is gone; gloo's are plain RuntimeErrors that name its transport."""

_START = """
import sys
from multiprocessing.connection import Connection
channel = Connection(int(sys.argv[1]))
sys.path[:] = channel.recv()
from turnwise.ext.fsdp.rank_group import serve
serve(channel, sys.argv[2])
"""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RankLost(EngineError):
    """A process of the learner is gone, and with it the state of all: the run goes on from its last checkpoint."""


class Ranks(Protocol):
    """A group of ranks, each a `rank.Rank` somewhere: processes here, or actors of a cluster."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def start(self, setup: RankSetup) -> None:
        """Open a rank in each place, in the stead of those that are there; an error of one ends all."""
        ...

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every rank at once, with a tuple of arguments for each; the answers in order.

        The error of a rank is raised here, the first one's where several have one. RankLost when one died or hangs;
        all are ended then, and so they are when the others do not come back from an error of one. One call at a time:
        others wait.
        """
        ...

    def stop(self) -> None:
        """End them all, whatever they are doing."""
        ...


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer of a rank whose method raised."""

    error: TurnwiseError | None
    text: str
    """The trace of anything else: a bug."""

    def throw(self, rank: int) -> NoReturn:
        """Raises the rank's error again in the driver."""
        if self.error is not None:
            raise self.error
        raise RuntimeError(f"rank {rank} of the learner: {self.text}")


def raise_first(answers: Sequence[Any]) -> RankLost | None:
    """The first error of any rank is raised; given back where it tore the group, which is to be ended first."""
    errors = [(number, answer) for number, answer in enumerate(answers) if isinstance(answer, Failed)]
    for number, answer in errors:
        if not isinstance(answer.error, RankLost):  # a cause: those who waited for it lost touch
            answer.throw(number)
    return next((answer.error for _, answer in errors if isinstance(answer.error, RankLost)), None)


class LocalRanks:
    """Ranks in processes of this machine; implements `Ranks`. `devices` has one for each: `("cpu", "cpu")`.

    They meet through a file, and each gets `threads` of the CPU. When none comes further in `hang_seconds`, they hang.
    """

    def __init__(self, devices: Sequence[str], threads: int = 1, hang_seconds: float = 1800.0) -> None:
        self._devices, self._threads = tuple(devices), max(1, threads)
        self._lock = threading.Lock()
        self._processes: list[children.Process] = []
        self._channels: list[Connection] = []
        self._folder = Path()
        self._meetings = 0
        self._limit = hang_seconds
        self._gone: str | None = "they were not started"

    @property
    def size(self) -> int:
        """How many ranks there are, one for each device."""
        return len(self._devices)

    def start(self, setup: RankSetup) -> None:
        """Start the processes if they do not run yet, and wait until all have opened their rank."""
        try:
            if not self._processes:
                self._begin()
            self._meetings += 1
            meeting = f"file://{self._folder}/meeting_{self._meetings}"
            places = [RankPlace(n, self.size, meeting, device, self._threads) for n, device in enumerate(self._devices)]
            self._ask("open", [(setup, position) for position in places], grace=0.0)
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        own = OwnFolder("turnwise-ranks-")
        self._folder = own.path
        self._end = weakref.finalize(self, _end, self._processes, self._channels, own)
        self._gone = None
        for number in range(self.size):
            self._spawn(number)
            self._channels[number].send([os.path.abspath(entry) for entry in sys.path])

    def _spawn(self, number: int) -> None:
        ours, theirs = connection.Pipe()
        with theirs, (self._folder / f"rank_{number}.log").open("wb") as log:
            threads = dict.fromkeys(_THREADS, str(self._threads))
            process = children.start(
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), str(self._folder)],
                pass_fds=(theirs.fileno(),),
                env={**_listening(), **os.environ, **threads, "TOKENIZERS_PARALLELISM": "false"},
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        self._channels.append(ours)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of every rank, as `Ranks.call` says."""
        return self._ask(method, arguments, GRACE_SECONDS)

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]], grace: float) -> list[Any]:
        with self._lock:
            if self._gone is not None:
                raise RankLost(f"the learner's processes are gone: {self._gone}")
            for number, (channel, call_arguments) in enumerate(zip(self._channels, arguments, strict=True)):
                try:
                    channel.send((method, call_arguments))
                except OSError:
                    self._lost(number, method)
            return self._answers(method, grace)

    def _answers(self, method: str, grace: float) -> list[Any]:
        answers: dict[int, Any] = {}
        waiting = {channel: number for number, channel in enumerate(self._channels)}
        watch, failed, deadline = RankWatch(self.size, self._limit), -1, float("inf")
        while waiting:
            left = min(BEAT_SECONDS, max(0.0, deadline - time.monotonic()))
            ready = [channel for channel in connection.wait(list(waiting), left) if isinstance(channel, Connection)]
            if not ready and time.monotonic() >= deadline:  # the others hang in a collective that a failed one left
                self._stop(f"rank {failed} failed in `{method}`")
                answers[failed].throw(failed)
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
                raise RankLost(f"the learner hangs in `{method}` and is ended: {problem}")
        results = [answers[number] for number in range(self.size)]
        if (torn := raise_first(results)) is not None:
            self._stop(str(torn))
            raise torn
        return results

    def _lost(self, number: int, method: str) -> NoReturn:
        process = self._processes[number]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        words = self._last_words(number)
        status = children.exit_words(process.returncode)
        problem = f"rank {number} of {self.size} (process {process.pid}) died in `{method}`: {status}"
        self._stop(problem)
        ending = f"; it said: {words}" if words else ""
        raise RankLost(f"the learner lost a process and with it its state: {problem}{ending}")

    def _last_words(self, number: int) -> str:
        try:
            text = (self._folder / f"rank_{number}.log").read_bytes()[-4 * LOG_TAIL :].decode(errors="replace")
        except OSError:
            return ""
        return " ".join(text.split())[-LOG_TAIL:]

    def stop(self) -> None:
        """Ends the processes of all ranks; what waits for them fails."""
        self._stop("they were ended")

    def _stop(self, why: str) -> None:
        if self._gone is None:
            self._gone = why
            self._end()


def _end(processes: list[children.Process], channels: list[Connection], own: OwnFolder) -> None:
    """A rank may hang in a collective or write a file that nobody will read: there is nothing to wait for."""
    for process in processes:
        children.kill(process)
    for channel in channels:
        channel.close()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        children.cut(process)
    own.remove()


def _listening() -> dict[str, str]:
    """On what the collectives of ranks on one machine listen, where the environment does not say otherwise."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo")


# --- in the process of a rank ---------------------------------------------------------------------------------------


def serve(channel: Connection, folder: str) -> None:
    """Open the rank that is asked for and answer calls until the driver is gone; an error is an answer too."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when its ranks end
        signal.signal(number, signal.SIG_IGN)
    children.when_parent_ends(partial(_leave, folder))  # even in the middle of a collective
    rank: list[Rank] = []
    sender = _RankChannel(channel)
    while True:
        try:
            method, arguments = channel.recv()
        except (EOFError, OSError):
            _leave(folder)
        sender.answer(partial(_open, rank) if method == "open" else getattr(rank[0], method), arguments)


def _open(rank: "list[Rank]", setup: RankSetup, position: RankPlace) -> None:
    from turnwise.ext.fsdp.rank import Rank

    for before in rank:
        before.leave()
    rank[:] = [Rank(setup, position)]


class _RankChannel:
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
    """An error as it travels: one that a person can mend as it is, a torn group as RankLost, a bug by its trace."""
    if isinstance(error, RuntimeError) and (type(error).__name__ in _BROKEN_GROUP or "gloo/transport" in str(error)):
        return Failed(RankLost(f"a rank lost touch with the others: {one_line(error)[:LOG_TAIL]}"), "")
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

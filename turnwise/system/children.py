"""Child processes: started with a lifeline, gone when this process is, even killed, and asked within a time limit.

The lifeline is a child's standard input, a pipe from us: the kernel closes it when we end, however that happens. Python
of ours watches it by `end_with_parent` or `when_parent_ends`; a script that only answers lines ends with its input; any
other command runs under `guard`, for which this file is a script too: it needs nothing but the standard library.
"""

import atexit
import contextlib
import fcntl
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

WATCH_SECONDS = 0.25
KIND_SECONDS = 10.0
"""For a guarded command to end by itself when it is told to."""
LAST_SECONDS = 1.0
"""For workers after their server has ended, and for the system to bury the dead."""
SPARE_SECONDS = 60.0
"""Wall time beyond the CPU seconds of a question: for starting, and for a machine that has no time for us."""
_TOO_MUCH = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
"""How a process ends when a question was too much for it: the clock, or an overrun stack."""

Process = subprocess.Popen[bytes]
T = TypeVar("T")


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
) -> Process:
    """A process with a lifeline, in a session of its own: Ctrl-C is for us, who may want to finish a step."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        bufsize=0,
        start_new_session=True,
    )


_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_START = "import sys; sys.path.append(sys.argv[3]); from importlib import import_module; "
_START += "import_module(sys.argv[1]).main(int(sys.argv[2]))"


def start_interpreter(module: str, channel: int) -> Process:
    """A new interpreter that calls `main(channel)` of a module of this package: nothing of ours is in it, no thread, no
    lock, no weights. Of the descriptors it has the channel alone."""
    return start(
        [sys.executable, "-P", "-c", _START, module, str(channel), str(Path(__file__).parents[2])],
        pass_fds=(channel,),
        env={**os.environ, **dict.fromkeys(_THREADS, "1"), "TOKENIZERS_PARALLELISM": "false"},
    )


def kill(process: Process) -> None:
    """With all that it has started. Before it is reaped: until then its number is nobody else's."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the second is how macOS speaks of the dead
            os.killpg(process.pid, signal.SIGKILL)


def cut(process: Process) -> None:
    """Close its lifeline, which tells it to end."""
    if process.stdin is not None:
        process.stdin.close()


def end(process: Process, seconds: float = 0.0) -> int:
    """Cut its lifeline, kill it if it is still there after so many seconds, and wait; its exit status."""
    if not seconds:
        kill(process)
    cut(process)
    try:
        return process.wait(seconds or None)
    except subprocess.TimeoutExpired:
        kill(process)
        return process.wait()


def exit_words(status: int | None) -> str:
    """How a process ended, by its exit status as `subprocess` gives it."""
    if status is None:
        return "it does not answer"
    if status >= 0:
        return f"exit status {status}"
    return signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"


# --- in the child ---------------------------------------------------------------------------------------------------


def end_with_parent() -> None:
    """Have the kernel end this process group when the lifeline is cut.

    A plug-in that hangs inside a regular expression holds the interpreter's lock: no thread and no handler of ours
    would run. The default action of SIGIO needs neither, and reaches what the plug-in has started too.
    """
    lifeline = _take_lifeline()
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if _readable(lifeline, 0):  # it was cut before the kernel knew whom to tell
        os.kill(os.getpid(), signal.SIGKILL)


def when_parent_ends(act: Callable[[], object]) -> None:
    """Call this in a thread of its own when the lifeline is cut."""
    lifeline, parent = _take_lifeline(), os.getppid()

    def watch() -> None:
        while not _is_cut(lifeline, parent, WATCH_SECONDS):
            pass
        act()

    threading.Thread(target=watch, daemon=True).start()


def guard(command: Sequence[str]) -> int:
    """Run a command of somebody else's; when the lifeline is cut, its whole session ends, kindly and then not.

    The command's exit code, or 0 when it was ended from above.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which says when we are to end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parent = os.getppid()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while process.poll() is None and not _is_cut(0, parent, WATCH_SECONDS):
            pass
    finally:
        status = process.poll()
        _end_session(process)
    return status or 0


def _end_session(leader: Process) -> None:
    """Whoever of it is left: workers may outlive the server."""
    for number, seconds in ((signal.SIGTERM, KIND_SECONDS), (signal.SIGKILL, LAST_SECONDS)):
        until, ended = time.monotonic() + seconds, False
        try:
            os.killpg(leader.pid, number)
            while time.monotonic() < until:
                if leader.poll() is not None:
                    os.killpg(leader.pid, 0)  # is a worker left?
                    until, ended = (until, True) if ended else (time.monotonic() + LAST_SECONDS, True)
                time.sleep(0.02)
        except ProcessLookupError:
            break
    leader.wait()


def _take_lifeline() -> int:
    """Out of the reach of what runs here: whoever reads standard input finds it empty."""
    lifeline, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return lifeline


def _is_cut(lifeline: int, parent: int, seconds: float) -> bool:
    """Within so many seconds; also when the parent is gone whose fork holds the other end open."""
    return (_readable(lifeline, seconds) and not os.read(lifeline, 4096)) or os.getppid() != parent


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()  # select takes no descriptor over 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


# --- children that are asked ----------------------------------------------------------------------------------------


class NoAnswer(Exception):
    """A process that was asked has ended or is silent; `too_much` when the question took too much time or memory."""

    def __init__(self, reason: str, too_much: bool = False) -> None:
        super().__init__(reason)
        self.too_much = too_much


class ClockedProcess:
    """A script that is asked questions which may take for ever: its CPU clock ends it, and the next one starts anew.

    No thread can be stopped that runs a regular expression or an arithmetic, and it would hold the interpreter. The
    script imports nothing of this package; it reads JSON lines and answers each with one, and sets
    `signal.ITIMER_PROF` to `seconds` of the question meanwhile. Used by one thread at a time.
    """

    def __init__(self, script: Path, most_questions: int) -> None:
        self._script, self._most_questions = script, most_questions
        self._process: Process | None = None
        self._questions, self._status = 0, 0

    def ask(self, question: Mapping[str, Any], seconds: float) -> Any:
        """What the script answers within so many CPU seconds; when it fails for another reason it is asked twice."""
        line = json.dumps({**question, "seconds": seconds}).encode() + b"\n"
        reply = self._ask(line, seconds + SPARE_SECONDS) or self._ask(line, seconds + SPARE_SECONDS)
        if not reply:
            raise NoAnswer(f"its process ended twice, at last with {exit_words(self._status)}")
        return json.loads(reply)

    def _ask(self, line: bytes, wall: float) -> bytes:
        """The line that answers a line; empty when the process ended."""
        if self._process is None or self._questions >= self._most_questions:
            self.close()
            # -P: the script's folder must not stand in for Python's own modules.
            command = [sys.executable, "-P", str(self._script)]
            self._process = start(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            self._questions = 0
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        self._questions += 1
        deadline = time.monotonic() + wall
        reply = bytearray()
        with contextlib.suppress(BrokenPipeError):  # it ended: so does its output
            while line:
                line = line[process.stdin.write(line) :]
        while not reply.endswith(b"\n"):
            if not _readable(process.stdout.fileno(), deadline - time.monotonic()):
                self.close()
                raise NoAnswer(f"it did not answer within {wall:g} s")
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                self._status = process.wait()
                self.close()
                if self._status in _TOO_MUCH:
                    raise NoAnswer(f"its process ended: {exit_words(self._status)}", too_much=True)
                return b""
            reply += piece
        return bytes(reply)

    def close(self) -> None:
        """Kill the process and wait for its end."""
        process, self._process = self._process, None
        if process is not None:
            end(process)
            assert process.stdout is not None
            process.stdout.close()


class ClockedProcesses:
    """A few processes of one script, each replaced after so many questions: started when first needed, lent to whoever
    asks, ended with this one. A fork of this one starts its own."""

    _threads: ThreadPoolExecutor | None
    _all: list[ClockedProcess]
    _idle: queue.LifoQueue[ClockedProcess]

    def __init__(self, script: Path, processes: int, most_questions: int) -> None:
        self._script, self._processes, self._most_questions = script, processes, most_questions
        self.forget()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self.forget)

    def ask(self, question: Mapping[str, Any], seconds: float) -> Any:
        """What the script answers within so many CPU seconds, NoAnswer otherwise; from a thread that may wait."""
        with self._lent() as process:
            return process.ask(question, seconds)

    def submit(self, work: Callable[..., T], *arguments: Any, **options: Any) -> "Future[T]":
        """Call what asks, in a thread that may wait."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._processes, self._script.stem)
            return self._threads.submit(work, *arguments, **options)

    def close(self) -> None:
        """End every process; the next question starts new ones."""
        with self._lock:
            threads, every = self._threads, self._all
            self._reset()
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        for process in every:
            process.close()

    def forget(self) -> None:
        """After a fork: the processes are the parent's."""
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._threads, self._all, self._idle = None, [], queue.LifoQueue()

    @contextlib.contextmanager
    def _lent(self) -> Iterator[ClockedProcess]:
        with self._lock:
            idle, process = self._idle, None
            if idle.empty() and len(self._all) < self._processes:
                process = ClockedProcess(self._script, self._most_questions)
                self._all.append(process)
        process = process or idle.get()
        try:
            yield process
        finally:
            idle.put(process)


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))

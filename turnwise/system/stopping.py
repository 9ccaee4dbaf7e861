"""SIGINT and SIGTERM: at any moment of a command everything is closed behind it, and it ends with one line."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_waiting: contextvars.ContextVar[list[Callable[[int], None]] | None] = contextvars.ContextVar("waiting", default=None)
"""In a thread that the main one waits for: what a signal there calls, the last entry first."""
NUMBERS = (signal.SIGINT, signal.SIGTERM)
CANCEL_SECONDS = 3.0
"""How long an event loop may be busy with one thing before a signal interrupts that."""


class Stopped(KeyboardInterrupt):
    """A signal that ended a command: `Stopped(signal.SIGTERM)` reads "stopped by SIGTERM"."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        """As a shell says it."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """A signal raises Stopped wherever the block is; inside `run_stoppable` it cancels what runs there instead."""

    def stop(number: int) -> None:
        raise Stopped(number)

    with _handling(stop):
        yield


def run_stoppable(work: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, and where a loop runs already (every notebook's cell) in a thread that is waited for.

    The first signal cancels the work, which closes what it opened; a second one ends it at once. So does the first
    where the loop does not hear of it: somebody's code, or a large file, keeps it from turning.
    """
    received: list[int] = []
    requested, heard = threading.Event(), threading.Event()

    def insist() -> None:
        requested.wait()
        if not heard.wait(CANCEL_SECONDS):
            os.kill(os.getpid(), received[0])

    async def body() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            received.append(number)
            if len(received) > 1:
                raise Stopped(number)
            requested.set()
            # Through the loop's own door, which wakes it: a signal alone does not end its wait.
            loop.call_soon_threadsafe(cancel, str(Stopped(number)))

        def cancel(reason: str) -> None:
            heard.set()
            task.cancel(reason)

        # Started before there is a signal: inside a handler, which may have interrupted just that, no thread can be.
        threading.Thread(target=insist, name="turnwise-stopping", daemon=True).start()
        with _handling(stop):
            try:
                return await work
            finally:
                heard.set()
                requested.set()

    running = body()
    try:
        return _in_a_thread(running) if _a_loop_runs_here() else asyncio.run(running)
    except asyncio.CancelledError:
        if received:
            raise Stopped(received[0]) from None
        raise
    finally:
        for unawaited in (running, work):  # a signal before its first line leaves it so, and Python would say it
            if inspect.getcoroutinestate(unawaited) == inspect.CORO_CREATED:
                unawaited.close()


def _a_loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_a_thread(work: Coroutine[Any, Any, T]) -> T:
    """The work in an event loop of another thread. Signals reach this one, and are handled as that one asks."""
    acts: list[Callable[[int], None]] = []
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        _waiting.set(acts)
        try:
            outcome.set_result(asyncio.run(work))
        except BaseException as error:  # handed over to the caller, whatever it is
            outcome.set_exception(error)

    def act(number: int) -> None:
        if not acts:
            raise Stopped(number)
        acts[-1](number)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="turnwise-loop", daemon=True)
    with _handling(act):
        thread.start()
        result = outcome.result()
    thread.join()
    return result


@contextlib.contextmanager
def first_signal(act: Callable[[], None]) -> Iterator[None]:
    """The first signal in this block of a running event loop calls `act`; later ones do what they did before it."""
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def once(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            loop.call_soon_threadsafe(act)
        else:
            before(number)

    with _handling(once) as before:
        yield


@contextlib.contextmanager
def _handling(act: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Signals call `act`; one that the parent has us ignore, as in the background of a script, stays ignored.

    Yields a function that does what a signal did before, which it does again afterwards. In a thread that another
    waits for (`_in_a_thread`) the signals of that other one call `act`; in any further thread none does.
    """
    acts = _waiting.get()
    if acts is not None:
        below = acts[-1] if acts else None
        acts.append(act)
        try:
            yield below or _no_act
        finally:
            acts.remove(act)
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    mine = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():  # where handlers cannot be set
        mine = []

    def handle(number: int, frame: FrameType | None) -> None:
        act(number)

    def as_before(number: int) -> None:
        signal.signal(number, before[signal.Signals(number)])
        signal.raise_signal(number)

    for number in mine:
        signal.signal(number, handle)
    try:
        yield as_before
    finally:
        for number in mine:
            signal.signal(number, before[number])


def _no_act(number: int) -> None:
    raise Stopped(number)

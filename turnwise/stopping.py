"""SIGINT and SIGTERM: at any moment of a command everything is closed behind it, and it ends with one line."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
NUMBERS = (signal.SIGINT, signal.SIGTERM)
HEARING_SECONDS = 3.0
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
    """As asyncio.run. The first signal cancels the work, which closes what it opened; a second one ends it at once.

    So does the first where the loop does not hear of it: somebody's code, or a large file, keeps it from turning.
    """
    received: list[int] = []
    asked, heard = threading.Event(), threading.Event()

    def insist() -> None:
        asked.wait()
        if not heard.wait(HEARING_SECONDS):
            os.kill(os.getpid(), received[0])

    async def body() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            received.append(number)
            if len(received) > 1:
                raise Stopped(number)
            asked.set()
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
                asked.set()

    running = body()
    try:
        return asyncio.run(running)
    except asyncio.CancelledError:
        if received:
            raise Stopped(received[0]) from None
        raise
    finally:
        running.close()  # a signal before its first line leaves it unawaited, and Python would say so
        work.close()


@contextlib.contextmanager
def first_signal(act: Callable[[], None]) -> Iterator[None]:
    """The first signal in this block of a running event loop calls `act`; later ones do what they did before it."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def once(number: int) -> None:
        seen.append(number)
        if len(seen) == 1:
            loop.call_soon_threadsafe(act)
        else:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    with _handling(once) as before:
        yield


@contextlib.contextmanager
def _handling(act: Callable[[int], None]) -> Iterator[dict[int, Any]]:
    """Signals call `act`; one that the parent has us ignore, as in the background of a script, stays ignored.

    Yields what they did before, which they do again afterwards.
    """
    before = {number: signal.getsignal(number) for number in NUMBERS}
    mine = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():  # where handlers cannot be set
        mine = []

    def handle(number: int, frame: FrameType | None) -> None:
        act(number)

    for number in mine:
        signal.signal(number, handle)
    try:
        yield {int(number): handler for number, handler in before.items()}
    finally:
        for number in mine:
            signal.signal(number, before[number])

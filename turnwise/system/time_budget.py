"""Time that an episode spends waiting for its turn, so that its time budget counts only what it does itself.

Whoever makes an episode wait for a slot says so here; the episode finds out through the context that its tasks share.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar

SOONEST = 0.05
"""Seconds between two looks at a budget. Its rest stands still while an episode waits: a small one would be looked at
without a pause."""
clock: Callable[[], float] = time.monotonic


class _Waits:
    """What one episode waited, so far. Waits at the same time, of calls side by side, count once."""

    def __init__(self) -> None:
        self._ended = 0.0
        self._deep = 0
        self._since = 0.0
        self._reported: list[Callable[[], float]] = []

    def seconds(self) -> float:
        here = clock() - self._since if self._deep else 0.0
        return self._ended + here + sum(report() for report in self._reported)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._since = clock() if not self._deep else self._since
        self._deep += 1
        try:
            yield
        finally:
            self._deep -= 1
            if not self._deep:
                self._ended += clock() - self._since

    @contextlib.contextmanager
    def reported(self, seconds: Callable[[], float]) -> Iterator[None]:
        self._reported.append(seconds)
        try:
            yield
        finally:
            self._reported.remove(seconds)
            self._ended += seconds()


_waits: ContextVar[_Waits | None] = ContextVar("waits", default=None)


@contextlib.contextmanager
def reported_wait(seconds: Callable[[], float]) -> Iterator[None]:
    """While the block runs, `seconds` says how much of it is waiting so far; any thread may move it on."""
    waits = _waits.get()
    with contextlib.nullcontext() if waits is None else waits.reported(seconds):
        yield


@contextlib.contextmanager
def measured() -> Iterator[Callable[[], float]]:
    """For tasks made in the block: how long they have waited so far, for an episode that another process has."""
    waits = _Waits()
    before = _waits.set(waits)
    try:
        yield waits.seconds
    finally:
        _waits.reset(before)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """The block waits for its turn: that is not the episode's time."""
    waits = _waits.get()
    with contextlib.nullcontext() if waits is None else waits.waiting():
        yield


class slot:
    """`async with slots`, whose waiting is not the episode's time."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots

    async def __aenter__(self) -> None:
        waits = _waits.get() if self._slots.locked() else None  # a free one is there at once
        with contextlib.nullcontext() if waits is None else waits.waiting():
            await self._slots.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._slots.release()


class _Deadline:
    """Ends a block when its time, less what it waited, is over. No closure: one that calls itself is a cycle, which
    would keep the episode's task and with it all that the episode wrote until Python looks for such."""

    def __init__(self, limit: float, waits: _Waits, timeout: asyncio.Timeout) -> None:
        self._limit, self._waits, self._timeout = limit, waits, timeout
        self._start, self._loop = clock(), asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._check()

    def _check(self) -> None:
        """Nobody tells when a wait begins or ends, so at the end of the time it is asked how much of it was waiting."""
        left = self._limit - (clock() - self._start - self._waits.seconds())
        if left > 0:
            self._timer = self._loop.call_later(max(left, SOONEST), self._check)
        else:
            self._timeout.reschedule(self._loop.time())

    def cancel(self) -> None:
        """The block has ended by itself."""
        if self._timer is not None:
            self._timer.cancel()


@contextlib.asynccontextmanager
async def budget(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout` for so many seconds in which the block's waits are left out; None sets no limit."""
    waits = _Waits()
    before = _waits.set(waits)
    try:
        async with asyncio.timeout(None) as timeout:
            deadline = None if seconds is None else _Deadline(seconds, waits, timeout)
            try:
                yield timeout
            finally:
                if deadline is not None:
                    deadline.cancel()
    finally:
        _waits.reset(before)

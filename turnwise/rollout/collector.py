"""Many groups at once: keeps a bounded number under way and hands them out in the order they were started."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

from turnwise.concurrency import rare_cycle_searches
from turnwise.rollout.plugin_calls import to_the_end
from turnwise.types import Group

T = TypeVar("T")
"""What a group is played from: a sample, or a sample with what belongs to it."""

RunGroup = Callable[[T], Awaitable[Group]]
ScoreGroup = Callable[[Group], Awaitable[None]]


class Collector(Generic[T]):
    """produces: groups in start order. waits for: the oldest group. unblocked by: any group that finishes or fails.

    `ahead` bounds the groups started and not yet handed out, `running` those being played and also those being scored;
    a played group at once makes room for the next, so that a slow judge does not leave the engine idle. Start order
    matters: handing out whatever finishes first would crowd out long episodes.
    """

    def __init__(
        self, samples: Iterable[T], run: RunGroup[T], *, running: int, ahead: int, score: ScoreGroup | None = None
    ) -> None:
        if running < 1 or ahead < 1:
            raise ValueError("running and ahead must be at least 1")
        self._items: Iterator[T] = iter(samples)
        self._run, self._score = run, score
        self._scoring = asyncio.Semaphore(running)
        self._running, self._ahead = running, ahead
        self._started: deque[asyncio.Task[Group]] = deque()
        self._ready: list[Group] = []
        """Taken from `_started` for a call of `next_groups` that was cancelled before it had all it asked for."""
        self._busy = 0
        self._searches = rare_cycle_searches()
        self._closed = False
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._searches.__enter__()
        self.fill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for task in self._started:
            task.cancel()
        try:
            await to_the_end(_settled(self._started))
        finally:
            self._started.clear()
            self._ready.clear()
            self._searches.__exit__(None, None, None)

    async def next_groups(self, count: int) -> list[Group]:
        """The next `count` groups, fewer at the end of the samples, none when all were handed out.

        The first failure of any group is raised as soon as there is nothing finished to hand out before it.
        """
        while len(self._ready) < count and await self._oldest_is_done():
            self._ready.append(self._started.popleft().result())
            self.fill()
        groups, self._ready = self._ready[:count], self._ready[count:]
        return groups

    async def _oldest_is_done(self) -> bool:
        """Wait for the oldest group; False when there is none."""
        if self._started and not self._started[0].done():
            failed = asyncio.ensure_future(self._failed.wait())
            try:
                await asyncio.wait((self._started[0], failed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                failed.cancel()
        oldest = self._started[0] if self._started else None
        good = oldest is not None and oldest.done() and not oldest.cancelled() and oldest.exception() is None
        if self._failure is not None and not good:
            raise self._failure
        return oldest is not None

    def fill(self) -> None:
        """Start what the bounds allow; to be called when samples that had ended go on."""
        while not self._closed and self._failure is None:
            if self._busy >= self._running or len(self._started) >= self._ahead:
                return
            try:
                sample = next(self._items, None)
            except Exception as error:  # raised to whoever waits, after what was started before
                self._fail(error)
                return
            if sample is None:
                return
            self._busy += 1
            self._started.append(asyncio.ensure_future(self._play(sample)))

    async def _play(self, sample: T) -> Group:
        """One group. It makes room for the next before it is done, so that `next_groups` never finds a gap."""
        try:
            try:
                group = await self._run(sample)
            finally:
                self._busy -= 1
            self.fill()
            if self._score is not None:
                async with self._scoring:
                    await self._score(group)
            return group
        except asyncio.CancelledError:
            self._fail(RuntimeError("a group was cancelled from elsewhere"))
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self._failure is None and not self._closed:
            self._failure = error
            self._failed.set()


async def _settled(tasks: Iterable[asyncio.Task[Group]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)

"""Many groups at once: keeps a bounded number under way and hands them out in the order they were started."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

from turnwise.types import Group, Sample

RunGroup = Callable[[Sample], Awaitable[Group]]


class Collector:
    """produces: groups in start order. waits for: the oldest group. unblocked by: any group that finishes.

    `ahead` bounds the groups started and not yet handed out; a finished group at once makes room for `running` more.
    Start order matters: handing out whatever finishes first would crowd out long episodes.
    """

    def __init__(self, samples: Iterable[Sample], run: RunGroup, *, running: int, ahead: int) -> None:
        if running < 1 or ahead < 1:
            raise ValueError("running and ahead must be at least 1")
        self._samples: Iterator[Sample] = iter(samples)
        self._run = run
        self._running, self._ahead = running, ahead
        self._started: deque[asyncio.Task[Group]] = deque()
        self._busy = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        self._fill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for task in self._started:
            task.cancel()
        await asyncio.gather(*self._started, return_exceptions=True)

    async def next_groups(self, count: int) -> list[Group]:
        """The next `count` groups, fewer at the end of the samples, none when all were handed out."""
        groups: list[Group] = []
        while len(groups) < count and self._started:
            groups.append(await self._started[0])
            self._started.popleft()
            self._fill()
        return groups

    def _fill(self) -> None:
        while not self._closed and self._busy < self._running and len(self._started) < self._ahead:
            sample = next(self._samples, None)
            if sample is None:
                return
            task = asyncio.ensure_future(self._run(sample))
            self._busy += 1
            task.add_done_callback(self._finished)
            self._started.append(task)

    def _finished(self, task: asyncio.Task[Group]) -> None:
        self._busy -= 1
        if not task.cancelled() and task.exception() is None:
            self._fill()

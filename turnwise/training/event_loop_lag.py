"""How late the event loop is: what blocks it stalls every episode, and would otherwise show as slow tools."""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

INTERVAL = 0.05


class LoopLag:
    """Sleeps again and again while a block runs, and keeps the worst delay of its waking: `lag.take()`."""

    def __init__(self, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval, self._clock = interval, clock
        self._worst = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def take(self) -> dict[str, float]:
        """The longest delay since this was last asked."""
        worst, self._worst = self._worst, 0.0
        return {"timing_s/loop_lag_max": worst}

    async def _watch(self) -> None:
        while True:
            asleep = self._clock()
            await asyncio.sleep(self._interval)
            self._worst = max(self._worst, self._clock() - asleep - self._interval)

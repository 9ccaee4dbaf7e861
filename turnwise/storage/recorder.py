"""What a run writes while it goes on, off the event loop: one thread does it all, in the order it was asked for."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from turnwise.storage.run_dir import RunDir
from turnwise.storage.underway import UnderwayWriter
from turnwise.types import Trajectory

P = ParamSpec("P")
T = TypeVar("T")


class Recorder:
    """Parquet, hashes and fsync take long enough to stall every episode that is under way, so they happen here.

    `do` waits for: the worker. unblocked by: its work being done, or raised. The work of a caller that is cancelled
    meanwhile is done all the same, and what is asked for later comes after it. `with` waits for the last of it.
    """

    def __init__(self, run: RunDir) -> None:
        from turnwise.storage.images.copies import Album

        self.run = run
        self._album = Album(run)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="turnwise-recorder")
        self._underway = UnderwayWriter(run)

    def __enter__(self) -> Self:
        self._underway.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._underway.__exit__()
        self._worker.shutdown(wait=True)

    async def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises."""
        return await asyncio.shield(asyncio.wrap_future(self._worker.submit(work, *args, **kwargs)))

    async def record(self, file: str, trajectories: Sequence[Trajectory]) -> None:
        """Write a trajectory file, the images it speaks of, and its line of the index."""
        from turnwise.storage.index import record

        await self.do(record, self.run, file, trajectories, self._album)
        self._underway.episodes.recorded(trajectories)

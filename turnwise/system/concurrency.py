"""Work side by side: the first failure ends the rest and is raised itself, not inside a group of errors."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from turnwise.errors import first_cause

Item = TypeVar("Item")
T = TypeVar("T")


YOUNG = 100_000
"""Objects after which Python looks for unreachable cycles while episodes are under way. They make few of those, and
many objects that live as long as a reply takes: by its own 700, half of a rollout's time would go into looking."""
_searching: list[tuple[int, int, int]] = []
"""The thresholds that were there, one for each that runs."""


@contextmanager
def rare_cycle_searches() -> Iterator[None]:
    """Python looks for unreachable cycles seldom, and not among what is there now: models, libraries and samples are a
    million objects that stay, and going through them holds up every thread for a second."""
    thresholds = gc.get_threshold()
    if not _searching:
        gc.freeze()
    _searching.append(thresholds)
    if 0 < thresholds[0] < YOUNG:
        gc.set_threshold(YOUNG, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*_searching.pop())
        if not _searching:
            gc.unfreeze()


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each of them returns, in their order."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as errors:
        failure = first_cause(errors)
    if failure is not None:  # raised out here, where its own cause stays what a log shows
        raise failure
    return [task.result() for task in tasks]


async def each(work: Callable[[Item], Awaitable[T]], items: Iterable[Item], at_once: int) -> list[T]:
    """The same work for every item, with so many under way; results in the order of the items."""
    slots = asyncio.Semaphore(at_once)

    async def one(item: Item) -> T:
        async with slots:
            return await work(item)

    return await gather_all(one(item) for item in items)

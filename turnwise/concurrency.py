"""Work side by side: the first failure ends the rest and is raised itself, not inside a group of errors."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from turnwise.errors import first_cause

Item = TypeVar("Item")
T = TypeVar("T")


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each of them returns, in their order."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
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

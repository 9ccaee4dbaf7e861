"""The same for many things at once: a bounded number under way, the results in order, one failure ends the rest."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def each(work: Callable[[Item], Awaitable[Result]], items: Iterable[Item], at_once: int) -> list[Result]:
    """The results in the order of the items. What one raises is raised as it is, after the others were cancelled."""
    slots = asyncio.Semaphore(at_once)

    async def one(item: Item) -> Result:
        async with slots:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""What scorers hold open (connections, sandboxes), by event loop, so that whoever ran the scorers can close it."""

import asyncio
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Generic, Protocol, Self, TypeVar

from turnwise.system.metrics import Metric, reduce


class Closable(Protocol):
    """Something that belongs to the event loop it was made in."""

    async def close(self) -> None: ...


class Counting:
    """A resource that counts what it does; what all of one class counted is told together."""

    @classmethod
    def take_counts(cls, resources: Sequence[Self]) -> list[Metric]:
        """What they did since this was last called."""
        raise NotImplementedError

    @classmethod
    def levels(cls, resources: Sequence[Self]) -> list[Metric]:
        """What is so now, such as what is left of a limit."""
        return []


Resource = TypeVar("Resource", bound=Closable)

Held = TypeVar("Held")


class KeptOpen(Generic[Held]):
    """Something that a task keeps open, so that it is closed with the event loop when nobody closes it before."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Held]]) -> None:
        self._make = make
        self._opened: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep())

    async def opened(self) -> Held:
        """It, as soon as it is open; the error when it could not be opened."""
        return await asyncio.shield(self._opened)

    async def close(self) -> None:
        """Ends the resource and waits until the task that held it is over."""
        self._end.set()
        await asyncio.wait((self._keeper,))

    async def _keep(self) -> None:
        try:
            async with self._make() as held:
                self._opened.set_result(held)
                await self._end.wait()
        except BaseException as error:  # whoever waits for it gets it; a later one was raised by closing
            if self._opened.done():
                raise
            self._opened.set_exception(error)
            self._opened.exception()  # seen: perhaps nobody waits any more


_RESOURCES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Closable]] = weakref.WeakKeyDictionary()


def loop_resource(kind: type[Resource], key: Hashable, make: Callable[[], Resource]) -> Resource:
    """The one object of this kind and key in the running event loop, made when first asked for."""
    here = _RESOURCES.setdefault(asyncio.get_running_loop(), {})
    resource = here.get((kind, key))
    if resource is None:
        resource = here[kind, key] = make()
    assert isinstance(resource, kind)
    return resource


_REPORTED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Metric]] = weakref.WeakKeyDictionary()


def report_counts(metrics: Sequence[Metric]) -> None:
    """What resources of another process did for a run of this event loop."""
    _REPORTED.setdefault(asyncio.get_running_loop(), []).extend(metrics)


def take_counts() -> list[Metric]:
    """What the resources of the running event loop did since this was last called, and what was reported."""
    reported = _REPORTED.pop(asyncio.get_running_loop(), [])
    return [*(metric for kind, resources in _counting().items() for metric in kind.take_counts(resources)), *reported]


def take_metrics() -> dict[str, float]:
    """The same, with what holds of them now, by name: `judge/requests` and so on."""
    levels = [metric for kind, resources in _counting().items() for metric in kind.levels(resources)]
    return reduce([*take_counts(), *levels])


def _counting() -> dict[type[Counting], list[Counting]]:
    here = _RESOURCES.get(asyncio.get_running_loop(), {})
    by_kind: dict[type[Counting], list[Counting]] = {}
    for resource in here.values():
        if isinstance(resource, Counting):
            by_kind.setdefault(type(resource), []).append(resource)
    return by_kind


async def close_loop_resources() -> None:
    """Close everything that scorers opened in the running event loop; what they need again is made again."""
    here = _RESOURCES.pop(asyncio.get_running_loop(), {})
    results = await asyncio.gather(*(resource.close() for resource in here.values()), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result

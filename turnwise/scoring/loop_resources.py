"""What scorers hold open (connections, sandboxes), by event loop, so that whoever ran the scorers can close it."""

import asyncio
import weakref
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar


class Closable(Protocol):
    """Something that belongs to the event loop it was made in."""

    async def close(self) -> None: ...


Resource = TypeVar("Resource", bound=Closable)

_RESOURCES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Closable]] = weakref.WeakKeyDictionary()


def loop_resource(kind: type[Resource], key: Hashable, make: Callable[[], Resource]) -> Resource:
    """The one object of this kind and key in the running event loop, made when first asked for."""
    here = _RESOURCES.setdefault(asyncio.get_running_loop(), {})
    found = here.get((kind, key))
    if found is None:
        found = here[kind, key] = make()
    assert isinstance(found, kind)
    return found


def loop_resources(kind: type[Resource]) -> list[Resource]:
    """Every object of this kind in the running event loop."""
    here = _RESOURCES.get(asyncio.get_running_loop(), {})
    return [one for one in here.values() if isinstance(one, kind)]


async def close_loop_resources() -> None:
    """Close everything that scorers opened in the running event loop; what they need again is made again."""
    here = _RESOURCES.pop(asyncio.get_running_loop(), {})
    results = await asyncio.gather(*(one.close() for one in here.values()), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result

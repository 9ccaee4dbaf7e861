"""The open sessions of a server by ids that nobody can guess: so many at once, closed when nobody calls for long."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fastapi import HTTPException

from turnwise.system.serving import RETRY_SECONDS


class ClosableSession(Protocol):
    """What a server keeps open for a client."""

    async def close(self) -> None: ...


S = TypeVar("S", bound=ClosableSession)


@dataclass(slots=True)
class _OpenEntry(Generic[S]):
    session: S
    last: float
    """When it was used."""
    running: int = 0


class OpenSessions(Generic[S]):
    """Sessions between their opening and their end: `with sessions.using(number) as session`."""

    def __init__(self, most: int, idle_seconds: float) -> None:
        self._most = most
        self._idle_seconds = idle_seconds
        self._kept: dict[str, _OpenEntry[S]] = {}

    def __iter__(self) -> Iterator[S]:
        return (entry.session for entry in self._kept.values())

    def check_room(self) -> None:
        """429 when there are as many as the server takes."""
        if len(self._kept) >= self._most:
            text = f"{self._most} sessions are open, as many as this server takes"
            raise HTTPException(429, text, {"Retry-After": RETRY_SECONDS})

    def add(self, session: S) -> str:
        """Registers a session and returns its new id."""
        number = secrets.token_urlsafe(24)
        self._kept[number] = _OpenEntry(session, time.monotonic())
        return number

    @contextlib.contextmanager
    def using(self, number: str) -> Iterator[S]:
        """A session, which does not expire meanwhile; 404 when there is none."""
        entry = self._kept.get(number)
        if entry is None:
            raise HTTPException(404, "there is no such session; it may have expired")
        entry.running += 1
        try:
            yield entry.session
        finally:
            entry.running -= 1
            entry.last = time.monotonic()

    async def close(self, number: str) -> None:
        """Close it; an id that is none is fine."""
        entry = self._kept.pop(number, None)
        if entry is not None:
            await entry.session.close()

    @contextlib.asynccontextmanager
    async def swept(self) -> AsyncIterator[None]:
        """While the app lives: idle sessions are closed; afterwards all are."""
        sweeping = asyncio.ensure_future(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await asyncio.wait((sweeping,))
            for number in list(self._kept):
                await self.close(number)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._idle_seconds / 4)
            oldest = time.monotonic() - self._idle_seconds
            for number, entry in list(self._kept.items()):
                if not entry.running and entry.last < oldest:
                    await self.close(number)

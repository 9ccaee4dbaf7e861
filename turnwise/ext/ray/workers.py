"""A set of actors that do the same: each call goes to the one with the least to do, one that dies is replaced."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from turnwise.errors import EngineError, EngineLost
from turnwise.ext.ray.calls import NeedLost
from turnwise.ext.ray.connection import Connection
from turnwise.ext.ray.watchdog import ask_beat
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.system import time_budget

MOST_LOSSES = 5
"""At one place in a row, without an answer in between; then something kills every actor of the kind. Those of other
places do not count: they may have been on the same node."""
PAUSE_SECONDS = 1.0
"""More before each further actor that takes a place whose last one never worked."""


class Worker:
    """A slot of the pool: one actor at a time, made anew when it is lost."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.actor: Any = None
        """None while there is none."""
        self.placed = False
        """Whether a node had room for it."""
        self.busy = 0
        self.losses = 0
        """In a row."""
        self.starting: asyncio.Task[None] | None = None


class Workers:
    """`count` actors of a kind. `open` is awaited on each new one before it gets work."""

    def __init__(self, connection: Connection, kind: str, make: Callable[[], Any], count: int) -> None:
        self._connection = connection
        self._kind = kind
        self._make = make
        self._workers = [Worker(number + 1) for number in range(count)]
        self._changed = asyncio.Event()
        self._failed: Exception | None = None
        self._closed = False

    async def start(self) -> None:
        """Make all of them; returns when the first can work."""
        for worker in self._workers:
            self._fill(worker)
        starting = [worker.starting for worker in self._workers if worker.starting is not None]
        config, count = self._connection.config, len(self._workers)
        demand = f"{self._kind} {count} x {config.service_cpus:g} CPUs (ray.service_cpus)"
        placed = lambda: any(worker.placed for worker in self._workers)  # noqa: E731
        await self._connection.first(starting, placed, f"a {self._kind}", demand)
        if self._failed is not None:
            raise self._failed

    async def stop(self) -> None:
        """Ends all actors of the pool, those that are still starting too."""
        self._closed = True
        self._changed.set()
        tasks = [worker.starting for worker in self._workers if worker.starting is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers:
            if worker.actor is not None:
                self._connection.kill(worker.actor)
                worker.actor = None

    async def take(self) -> Worker:
        """The one with the least to do; waits while there is none."""
        while True:
            if self._failed is not None:
                raise self._failed
            if self._closed:
                raise EngineError(f"the {self._kind}s are stopped")
            there = [worker for worker in self._workers if worker.actor is not None]
            if there:
                return min(there, key=lambda worker: worker.busy)
            self._changed.clear()
            with time_budget.waiting():
                await self._changed.wait()

    @contextlib.asynccontextmanager
    async def working(self, worker: Worker) -> AsyncIterator[Any]:
        """Around calls to a worker's actor; EngineLost when it goes away, and then it is replaced."""
        actor = worker.actor
        if actor is None:
            raise EngineLost(f"{self._kind} {worker.number} was lost")
        worker.busy += 1
        try:
            with self._connection.calling(f"{self._kind} {worker.number}"):
                yield actor
            worker.losses = 0
        except NeedLost:
            raise
        except EngineLost as error:
            self._lose(worker, actor, error)
            raise
        finally:
            worker.busy -= 1

    def _lose(self, worker: Worker, actor: Any, error: EngineLost) -> None:
        if worker.actor is not actor or self._closed:
            return
        self._connection.count_loss(self._kind)
        worker.losses += 1
        self._connection.say(f"{error}; another one takes its place")
        self._connection.kill(actor)
        worker.actor = None
        if worker.losses > MOST_LOSSES:
            self._failed = EngineError(f"{worker.losses} actors were lost in a row: {error}")
            self._changed.set()
            return
        self._fill(worker)

    def _fill(self, worker: Worker) -> None:
        worker.starting = asyncio.create_task(self._start(worker))

    def _watch(self, worker: Worker, actor: Any, limit: float) -> None:
        loop, name = asyncio.get_running_loop(), f"{self._kind} {worker.number}"

        def silent(words: str) -> None:
            error = EngineLost(f"{name} {words}")
            loop.call_soon_threadsafe(self._lose_silent, worker, actor, error)

        self._connection.watchdog.watch(actor, limit, silent)

    def _lose_silent(self, worker: Worker, actor: Any, error: EngineLost) -> None:
        if worker.actor is actor:
            self._lose(worker, actor, error)
        else:  # it stands still while it opens: who waits for that hears that it is gone
            self._connection.say(str(error))
            self._connection.kill(actor)

    async def _start(self, worker: Worker) -> None:
        name, patiently = f"{self._kind} {worker.number}", self._connection.patiently
        room = self._connection.room
        while True:
            actor, worker.placed = self._make(), False
            try:
                with self._connection.calling(name):
                    waits = lambda: f"{name} waits for a node with room: the cluster has {room()}"  # noqa: E731
                    await patiently(ask_beat(actor), waits)
                    worker.placed = True
                    self._watch(worker, actor, self._connection.hang_seconds)
                    await patiently(actor.open.remote(), lambda: f"{name} is placed and still opens")
                    self._watch(worker, actor, self._connection.silent_seconds)
                break
            except (EngineLost, SandboxLost) as error:
                self._connection.kill(actor)  # it may live, and hold its place
                worker.losses += 1
                if worker.losses > MOST_LOSSES:
                    self._failed = error
                    break
                await asyncio.sleep(PAUSE_SECONDS * (worker.losses - 1))
            except asyncio.CancelledError:
                self._connection.kill(actor)
                raise
            except Exception as error:  # told to whoever asks for work, who would wait for ever
                self._failed = error
                break
        worker.actor, worker.starting = actor, None
        self._changed.set()


@contextlib.asynccontextmanager
async def shared(connection: Connection, key: str, make: Callable[[], Workers]) -> AsyncIterator[Workers]:
    """The running set of actors of this key; the first user starts it and the last one stops it."""
    service: _Service | None = connection.services.get(key)
    if service is None:
        workers = make()
        service = connection.services[key] = _Service(workers, asyncio.create_task(workers.start()))
    service.users += 1
    try:
        await asyncio.shield(service.start)
        yield service.workers
    finally:
        service.users -= 1
        if not service.users:
            del connection.services[key]
            await asyncio.shield(asyncio.ensure_future(_end(service)))


@dataclass(eq=False, slots=True)
class _Service:
    workers: Workers
    start: "asyncio.Task[None]"
    users: int = 0


async def _end(service: _Service) -> None:
    service.start.cancel()
    await asyncio.gather(service.start, return_exceptions=True)
    await service.workers.stop()

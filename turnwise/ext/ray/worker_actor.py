"""The actor that an episode worker runs in: messages of the run come and go with calls, turns are asked of samplers."""

import asyncio
import os
import pickle
import traceback
from typing import Any

from turnwise.ext.ray.connection import SearchPath, load_ray
from turnwise.ext.ray.roster import Roster, RosterSampler
from turnwise.ext.ray.sampler_actor import node_name
from turnwise.rollout.workers.link import LinkLost
from turnwise.rollout.workers.messages import Setup
from turnwise.rollout.workers.worker import EpisodeWorker
from turnwise.system import resources

WORKER_CALLS = 16
"""Calls that the actor works on at once: one each way, and who asks where it is."""


class Letterbox:
    """The actor's end of the link to the run: what is sent lies here until it is fetched."""

    def __init__(self) -> None:
        self._inbox: list[Any] = []
        self._outbox: list[object] = []
        self._came, self._lies = asyncio.Event(), asyncio.Event()
        self._closed = False

    def put(self, messages: list[Any]) -> None:
        """What the run sent."""
        self._inbox += messages
        self._came.set()

    async def fetch(self, seconds: float) -> list[object] | None:
        """All that is for the run, at least one message, and what comes in so many seconds after it; None when there
        will be none."""
        await self._lies.wait()
        if seconds and not self._closed:
            await asyncio.sleep(seconds)
        messages, self._outbox = self._outbox, []
        if not self._closed:
            self._lies.clear()
        return messages or (None if self._closed else messages)

    def send(self, message: object) -> None:
        """It goes with the next call of the run's."""
        self._outbox.append(message)
        self._lies.set()

    async def receive(self) -> list[Any]:
        """What has come since the last time."""
        while not self._inbox:
            if self._closed:
                raise LinkLost
            self._came.clear()
            await self._came.wait()
        messages, self._inbox = self._inbox, []
        return messages

    async def drain(self) -> None:
        """The run fetches for as long as it is there."""

    def close(self) -> None:
        """What lies here can still be fetched."""
        self._closed = True
        self._lies.set()
        self._came.set()


class EpisodeActor:
    """Plays episodes beside its samplers. Made an actor by `Connection.actor`."""

    def __init__(self, path: SearchPath, client: str) -> None:
        path.enter()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in workers on one machine
        self._client = client
        self._link = Letterbox()
        self._sampler: RosterSampler | None = None
        self._playing: asyncio.Task[None] | None = None

    async def beat(self) -> None:
        """A sign of life, by a thread of its own."""

    async def where(self) -> str:
        """The node it is on."""
        return node_name()

    async def deliver(self, content: bytes, roster: Roster | None) -> None:
        """Messages of the run, the Setup first; a new roster holds before any of them is read."""
        messages = pickle.loads(content)
        if self._playing is None:
            setup: Setup = messages.pop(0)
            if setup.sampler is not None:
                self._sampler = RosterSampler(load_ray(), setup.sampler, self._client, self._link.send)
            self._playing = asyncio.create_task(self._play(setup))
        if self._sampler is not None and roster is not None:
            self._sampler.take(roster)
        self._link.put(messages)

    async def collect(self, seconds: float) -> bytes:
        """Messages for the run; empty when the worker has ended."""
        messages = await self._link.fetch(seconds)
        return b"" if messages is None else pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)

    async def _play(self, setup: Setup) -> None:
        try:
            resources.share_among(setup.workers)
            await EpisodeWorker(self._link, setup, self._sampler).run()
        except BaseException:  # a process would end with it; here the end of the link says the same
            traceback.print_exc()
            raise
        finally:
            if self._sampler is not None:
                self._sampler.end()
            self._link.close()

"""Turns at a sampler in an actor, asked for by one process: many to a message, and so are results."""

import asyncio
import time
from typing import Any

from turnwise.engines.samplers.request import Request
from turnwise.errors import EngineError, EngineLost, EpisodeError
from turnwise.ext.ray.calls import calling
from turnwise.ext.ray.messages import PackedOutcomes, PackedRequests, TurnOutcome
from turnwise.ext.servers.images import SentImages
from turnwise.types import Completion

ACTOR = "its process"
WAIT_SHARE, SHORTEST_WAIT, LONGEST_WAIT = 0.01, 0.005, 0.25
LATELY = 0.05
"""The weight of one turn in what turns took lately."""


class SamplerCalls:
    """The turns of one process at one actor. Nothing is asked before `_begin` and after `_stop`.

    Requests that come while a message is on its way go with the next one, and so do results. A message also waits for
    more of them, a hundredth of the time that turns take here: it costs as much CPU as several turns.
    """

    def __init__(self, ray: Any, name: str, client: str) -> None:
        self.name = name
        self._ray, self._client = ray, client
        """By which the actor knows whose turns these are."""
        self._actor: Any = None
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._outbox: list[tuple[int, Request]] = []
        self._sent = SentImages()
        self._dropped: list[int] = []
        self._freed: list[str] = []
        self._turn_seconds = 0.0
        """What turns took lately."""
        self._sending: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None

    @property
    def collects(self) -> bool:
        """Whether results are still handed out."""
        return self._collecting is not None and not self._collecting.done()

    def _begin(self, actor: Any) -> None:
        """From now on turns are asked of this actor, which is open."""
        self._actor = actor
        self._sent.forget()
        self._collecting = asyncio.create_task(self._collect(actor))

    def _present(self) -> Any:
        """The actor; EngineLost between the end of one and the start of another."""
        if self._actor is None:
            raise EngineLost(f"{self.name} is not there")
        return self._actor

    def _stop(self, error: EngineError) -> Any:
        """Ask no more; who waits hears this. The actor that was asked, if any."""
        actor, self._actor = self._actor, None
        for task in (self._collecting, self._sending):
            if task is not None:
                task.cancel()
        self._fail(error)
        return actor

    async def generate(self, request: Request) -> Completion:
        """Continue a sequence; see the Sampler protocol."""
        self._present()
        if not self.collects:  # an answer would not be heard
            raise EngineLost(f"{self.name} hands out nothing any more")
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._outbox.append((number, request))
        self._send()
        start = time.monotonic()
        try:
            completion = await future
            self._turn_seconds += LATELY * (time.monotonic() - start - self._turn_seconds)
            return completion
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None:
                self._dropped.append(number)
                self._send()
            raise

    async def release(self, conversation: str) -> None:
        """Forget a conversation; it goes with the next message."""
        self._freed.append(conversation)
        self._send()

    @property
    def _gathering_seconds(self) -> float:
        """Seconds that a message waits for company; 0 where turns are so short that waiting would show."""
        seconds = min(WAIT_SHARE * self._turn_seconds, LONGEST_WAIT)
        return seconds if seconds >= SHORTEST_WAIT else 0.0

    def _send(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        """One message at a time; what comes meanwhile goes with the next."""
        while self._outbox or self._dropped or self._freed:
            if pause := self._gathering_seconds:
                await asyncio.sleep(pause)
            outbox, self._outbox = self._outbox, []
            dropped, self._dropped = self._dropped, []
            freed, self._freed = self._freed, []
            wanted = [entry for entry in outbox if entry[0] in self._waiting]
            images = [span for _, request in wanted for span in request.media]
            try:
                with calling(self._ray, ACTOR):
                    packed = PackedRequests.of(wanted, self._sent.new(images))
                    lacking = await self._present().submit.remote(self._client, packed, dropped, freed)
            except EngineLost as error:
                self._fail(error)
            except Exception as error:
                self._fail(error)
                raise
            else:
                self._sent.add(images)
                if lacking:  # it had no room to keep what it was sent
                    self._sent.forget()
                    self._outbox += [entry for entry in wanted if entry[0] in lacking]

    async def _collect(self, actor: Any) -> None:
        """Hand out results for as long as the actor lives."""
        try:
            while True:
                with calling(self._ray, ACTOR):
                    packed: PackedOutcomes = await actor.collect.remote(self._client, self._gathering_seconds)
                for outcome in packed.outcomes():
                    self._answer(outcome)
        except EngineLost as error:
            self._fail(error)
        except Exception as error:  # whoever waits must hear it: nothing will be handed out any more
            self._fail(error)
            raise

    def _answer(self, outcome: TurnOutcome) -> None:
        future = self._waiting.pop(outcome.number, None)
        if future is None or future.done():  # whoever asked does not wait any more
            return
        if outcome.completion is not None:
            future.set_result(outcome.completion)
        elif outcome.bug:
            future.set_exception(RuntimeError(f"{self.name} failed:\n{outcome.problem}"))
        elif outcome.ends_episode:
            future.set_exception(EpisodeError(outcome.problem))
        else:
            future.set_exception((EngineLost if outcome.lost else EngineError)(outcome.problem))

    def _fail(self, error: Exception) -> None:
        """Everybody who waits hears it."""
        waiting, self._waiting = self._waiting, {}
        self._outbox.clear()
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

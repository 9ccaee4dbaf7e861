"""The samplers that an episode worker of the cluster asks for turns: which there are, which are its own share, and
what becomes of a turn whose sampler goes away."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.engines.samplers.request import Request
from turnwise.errors import EngineError, EngineLost, one_line
from turnwise.ext.ray.sampler_calls import SamplerCalls
from turnwise.rollout.workers.messages import SamplerTraits
from turnwise.rollout.workers.worker import SamplerElsewhere
from turnwise.system import time_budget
from turnwise.types import Completion

Key = tuple[int, int]
"""Of a sampler, and the how manieth actor of it."""


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """A sampler that serves, as one worker sees it."""

    key: Key
    name: str
    actor: Any
    share: float
    """How much of it is this worker's; 0: it is for others, as long as the worker has any of its own."""


@dataclass(frozen=True, slots=True)
class Roster:
    """All samplers that serve now; it replaces the one before."""

    entries: tuple[RosterEntry, ...]
    given_up: str
    """Why there will be none any more."""


@dataclass(frozen=True, slots=True)
class SamplerSuspected:
    """To the run: this sampler did not answer."""

    key: Key
    problem: str


@dataclass(frozen=True, slots=True)
class SamplerWrote:
    """To the run: this actor has written its first turn here, so that it was not started in vain."""

    key: Key


def shares(samplers: int, workers: int, worker: int) -> list[float]:
    """How much of each sampler a worker has, all workers having as much: of 3 samplers the first of 2 workers has the
    first and half of the second. Neighbours are on one node, so that most of a worker's turns stay there."""
    begin, end = worker * samplers / workers, (worker + 1) * samplers / workers
    return [round(max(0.0, min(end, n + 1) - max(begin, n)), 9) for n in range(samplers)]


class SharedSampler(SamplerCalls):
    """One of them, with what is known of it here."""

    def __init__(self, ray: Any, entry: RosterEntry, client: str) -> None:
        super().__init__(ray, entry.name, client)
        self.key, self.share = entry.key, entry.share
        self.busy = 0
        """Turns under way."""
        self.wrote = False
        self.problem = ""
        """Why it is not asked until the run says that it serves."""
        self._begin(entry.actor)

    def end(self, problem: str) -> None:
        """Ask it no more, and have it forget what is under way there."""
        if (actor := self._stop(EngineLost(problem))) is not None:
            actor.leave.remote(self._client)  # not waited for: one that is gone has nothing to forget


class RosterSampler(SamplerElsewhere):
    """Implements `Sampler` for a worker's episodes: a conversation stays with its sampler, a new one goes to the one of
    the worker's own that has the least to do."""

    def __init__(self, ray: Any, facts: SamplerTraits, client: str, tell: Callable[[object], None]) -> None:
        super().__init__(facts)
        self._ray, self._client, self._tell = ray, client, tell
        self._numbers = itertools.count()
        self._samplers: dict[Key, SharedSampler] = {}
        self._homes: dict[str, SharedSampler] = {}
        self._given_up = ""
        self._changed = asyncio.Event()

    def take(self, message: object) -> None:
        """A new roster: turns go on at samplers that are no longer on it, and end when those do."""
        if not isinstance(message, Roster):
            return
        before, self._samplers = self._samplers, {}
        for entry in message.entries:
            sampler = before.pop(entry.key, None)
            if sampler is None or not sampler.collects:
                if sampler is not None:
                    sampler.end("it broke off")
                sampler = SharedSampler(self._ray, entry, f"{self._client}.{next(self._numbers)}")
            sampler.share, sampler.problem = entry.share, ""
            self._samplers[entry.key] = sampler
        for sampler in before.values():
            sampler.problem = sampler.problem or "it does not serve now"
        self._samplers |= {key: sampler for key, sampler in before.items() if sampler.collects}
        self._given_up = message.given_up
        self._changed.set()

    async def generate(self, request: Request) -> Completion:
        """The turn; EngineLost when its sampler goes away, which the run is told."""
        sampler = await self._choose(request.conversation)
        sampler.busy += 1
        try:
            completion = await sampler.generate(request)
        except EngineLost as error:
            if not sampler.problem:
                sampler.problem = one_line(error)
                self._tell(SamplerSuspected(sampler.key, sampler.problem))
            raise EngineLost(f"{sampler.name}: {error}", elsewhere=bool(self._serving())) from error
        finally:
            sampler.busy -= 1
        if not sampler.wrote:
            sampler.wrote = True
            self._tell(SamplerWrote(sampler.key))
        return completion

    async def release(self, conversation: str) -> None:
        """Forget where it was, and have it forgotten there."""
        sampler = self._homes.pop(conversation, None)
        if sampler is not None and not sampler.problem:
            await sampler.release(conversation)

    def end(self) -> None:
        """Nobody waits for a turn any more."""
        for sampler in self._samplers.values():
            sampler.end("the worker ends")

    async def _choose(self, conversation: str) -> SharedSampler:
        while True:
            home = self._homes.get(conversation)
            if home is not None and not home.problem:
                return home
            if serving := self._serving():
                own = [sampler for sampler in serving if sampler.share]
                if own:
                    chosen = min(own, key=lambda sampler: (sampler.busy + 1) / sampler.share)
                else:
                    chosen = min(serving, key=lambda sampler: sampler.busy)
                self._homes[conversation] = chosen
                return chosen
            if self._given_up:
                raise EngineError(self._given_up)
            self._changed.clear()
            with time_budget.waiting():
                await self._changed.wait()

    def _serving(self) -> Sequence[SharedSampler]:
        return [sampler for sampler in self._samplers.values() if not sampler.problem]

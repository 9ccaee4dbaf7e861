"""Several samplers behind one: a conversation stays with its replica, new ones go where least is under way, and a
replica that is lost is restarted and gets the latest weights again."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from turnwise.engines.samplers.request import Request
from turnwise.engines.samplers.sampler import Sampler
from turnwise.engines.weight_updates import FullWeights, Update
from turnwise.errors import EngineError, EngineLost, TurnwiseError, WeightsSuperseded, one_line
from turnwise.system import time_budget
from turnwise.system.concurrency import gather_all
from turnwise.types import Completion

if TYPE_CHECKING:
    from torch import Tensor

HEALTH_SECONDS = 10.0
"""Between two looks at replicas that serve."""
NEWER_SECONDS = 0.5
"""Between two tries to get weights that newer ones are about to replace."""
MOST_RESTARTS = 5
"""In a row, without a turn written in between; then a replica is given up."""


class Replica(Sampler, Protocol):
    """A sampler that can be lost and brought back: a server, an actor on a node."""

    name: str
    """As people read it in messages: `server 1 (http://127.0.0.1:8001)`."""
    problem: str
    """Why it was not healthy when it was last asked, where more is known than silence."""

    async def healthy(self) -> bool:
        """Whether it would serve a request now; never raises for a replica that is gone."""
        ...

    async def restart(self) -> None:
        """Bring it back, with whatever weights it starts from; turns under way there end in EngineLost.

        EngineLost when that failed and may be tried again, EngineError when nothing helps.
        """
        ...


@dataclass(slots=True, eq=False)
class _Seat:
    """A replica with what is known of it."""

    replica: Replica
    busy: int = 0
    """Turns under way."""
    version: int | None = None
    """Of the weights it was given here; None: those it started with."""
    repair: "asyncio.Task[None] | None" = None
    """Set while it does not serve."""
    restarts: int = 0
    """In a row, without a turn in between."""
    lost_by: str = ""
    """What it was lost by the last time."""
    given_up: str = ""

    @property
    def up(self) -> bool:
        return self.repair is None and not self.given_up


@dataclass(frozen=True, slots=True)
class _Published:
    """The latest weights in a form that can be given again: to each replica, and to one that came back."""

    update: Update
    version: int
    tensors: "list[tuple[str, Tensor]] | None" = None

    @classmethod
    def of(cls, update: Update, version: int) -> "_Published":
        """A stream is read once; it is kept, one copy of the weights in all."""
        if not isinstance(update, FullWeights):
            return cls(update, version)
        return cls(update, version, [(name, tensor.detach().clone()) for name, tensor in update.tensors])

    def again(self) -> Update:
        """The update, to be read from its start."""
        if self.tensors is None or not isinstance(self.update, FullWeights):
            return self.update
        return FullWeights(self.update.shapes, iter(self.tensors))


class Replicas:
    """Implements the Sampler protocol over several of them.

    A lost replica's turns end in EngineLost, which the episode answers by asking again; where no replica is left,
    requests wait for the first that comes back, and end in EngineError when none will.
    """

    def __init__(
        self, replicas: Sequence[Replica], say: Callable[[str], None], *, health_seconds: float = HEALTH_SECONDS
    ) -> None:
        if not replicas:
            raise EngineError("there is no replica to write with")
        self.capabilities = replicas[0].capabilities
        self.context_length = min(replica.context_length for replica in replicas)
        self.lost = 0
        """How often a replica was lost, so far."""
        self._seats: list[_Seat] = []
        self._say = say
        self._health_seconds = health_seconds
        self._homes: dict[str, _Seat] = {}
        self._published: _Published | None = None
        self._asleep = False
        self._changed = asyncio.Event()
        """Somebody came back or was given up: whoever waits for a replica looks again."""
        self._watch: asyncio.Task[None] | None = None
        self._closed = False
        for replica in replicas:
            self._seat(replica)

    @property
    def names(self) -> list[str]:
        """The names of the replicas that serve now."""
        return [seat.replica.name for seat in self._seats if seat.up]

    async def add(self, replica: Replica) -> None:
        """One more, from now on; it gets the latest weights first."""
        seat = self._seat(replica)
        seat.repair = asyncio.create_task(self._bring_back(seat, restart=False))
        await asyncio.shield(seat.repair)

    async def generate(self, request: Request) -> Completion:
        """The turn, by the replica that has the conversation, else by the one with the least under way."""
        self._start_watch()
        seat = await self._choose(request.conversation)
        seat.busy += 1
        try:
            completion = await seat.replica.generate(request)
        except EngineLost as error:
            self._lose(seat, error)
            raise EngineLost(
                f"{seat.replica.name}: {error}", elsewhere=any(other.up for other in self._seats)
            ) from error
        finally:
            seat.busy -= 1
        seat.restarts = 0
        return completion

    async def release(self, conversation: str) -> None:
        """Forget where it was, and what was kept for it there."""
        seat = self._homes.pop(conversation, None)
        if seat is not None and seat.up:
            with contextlib.suppress(EngineLost):  # what it kept went with it
                await seat.replica.release(conversation)

    async def publish(self, update: Update, version: int) -> None:
        """Give every replica the weights; one that is lost meanwhile gets them when it comes back."""
        self._start_watch()  # one that hangs over the first weights is found too
        self._published = await asyncio.to_thread(_Published.of, update, version)
        await self._everywhere(self._hand_over)

    async def sleep(self) -> None:
        """Puts all replicas to sleep, and those that come back meanwhile."""
        self._asleep = True
        await self._everywhere(lambda seat: seat.replica.sleep())

    async def wake(self) -> None:
        """Wakes all replicas that are there."""
        self._asleep = False
        await self._everywhere(lambda seat: seat.replica.wake())

    async def close(self) -> None:
        """Close every replica, whatever another one says."""
        self._closed = True
        self._changed.set()
        tasks = [task for task in (self._watch, *(seat.repair for seat in self._seats)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ended = await asyncio.gather(*(seat.replica.close() for seat in self._seats), return_exceptions=True)
        failed = [
            result for result in ended if isinstance(result, BaseException) and not isinstance(result, EngineLost)
        ]
        if failed:
            raise failed[0]

    @property
    def given_up(self) -> str:
        """Why nobody will serve any more; empty as long as somebody may."""
        if any(seat.up or seat.repair for seat in self._seats):
            return ""
        return f"no replica is left: {self._seats[-1].given_up}"

    # --- who writes a turn ------------------------------------------------------------------------------------------

    def _seat(self, replica: Replica) -> _Seat:
        if replica.capabilities != self.capabilities:
            raise EngineError(
                f"replicas must be alike: {replica.name} says of itself: {replica.capabilities}; "
                f"another one: {self.capabilities}"
            )
        self.context_length = min(self.context_length, replica.context_length)
        self._seats.append(seat := _Seat(replica))
        return seat

    async def _choose(self, conversation: str) -> _Seat:
        while True:
            if self._closed:
                raise EngineError("the sampler is closed")
            home = self._homes.get(conversation)
            if home is not None and home.up:
                return home
            serving = [seat for seat in self._seats if seat.up]
            if serving:
                least = min(serving, key=lambda seat: seat.busy)
                self._homes[conversation] = least
                return least
            if self.given_up:
                raise EngineError(self.given_up)
            self._changed.clear()
            with time_budget.waiting():
                await self._changed.wait()

    # --- losing and bringing back -----------------------------------------------------------------------------------

    def _lose(self, seat: _Seat, error: EngineLost) -> None:
        """It does not serve until it is known to be well, or was restarted; said once for all its turns."""
        if not seat.up or self._closed:
            return
        self.lost += 1
        seat.version = None  # it may have come back by itself, with the weights it starts from
        seat.lost_by = one_line(error)
        self._say(f"lost {seat.replica.name}: {seat.lost_by}")
        seat.repair = asyncio.create_task(self._bring_back(seat, restart=True))
        self._moved()

    async def _bring_back(self, seat: _Seat, *, restart: bool) -> None:
        """Restart it unless it is well after all, give it the latest weights, and let it serve.

        One that is only behind in weights, as newer ones are on their way, is well: it waits for those.
        """
        force = False
        try:
            while True:
                try:
                    if restart and (force or not await seat.replica.healthy()):
                        await self._restart(seat)
                    await self._catch_up(seat)
                    break
                except WeightsSuperseded:
                    restart = force = False
                    await asyncio.sleep(NEWER_SECONDS)
                except EngineLost as error:
                    restart = force = True
                    self._say(f"{seat.replica.name} is lost again: {one_line(error)}")
            if restart:
                self._say(f"{seat.replica.name} serves again")
        except Exception as error:  # whatever it was: a replica whose repair failed must not count as one that serves
            seat.given_up = f"{seat.replica.name} is given up: {one_line(error)}"
            self._say(seat.given_up)
            if not isinstance(error, TurnwiseError):
                raise
        finally:
            seat.repair = None
            self._moved()

    def _moved(self) -> None:
        """Somebody serves, or does not any more: who waits for a replica looks again."""
        self._changed.set()

    async def _catch_up(self, seat: _Seat) -> None:
        """The weights of the others and their sleep, also those that came while it was given these."""
        asleep: bool | None = None
        while (behind := self._is_behind(seat)) or asleep is not self._asleep:
            if behind:
                await self._hand_over(seat)
            else:
                asleep = self._asleep
                await (seat.replica.sleep() if asleep else seat.replica.wake())

    def _is_behind(self, seat: _Seat) -> bool:
        return self._published is not None and seat.version != self._published.version

    async def _restart(self, seat: _Seat) -> None:
        if seat.restarts >= MOST_RESTARTS:
            why = f"; the last time: {seat.lost_by}" if seat.lost_by else ""
            raise EngineError(f"no turn was written after {seat.restarts} restarts in a row{why}")
        seat.restarts += 1
        seat.version = None
        await seat.replica.restart()

    async def _hand_over(self, seat: _Seat) -> None:
        published = self._published
        if published is not None:
            await seat.replica.publish(published.again(), published.version)
            seat.version = published.version

    async def _everywhere(self, work: Callable[[_Seat], Awaitable[None]]) -> None:
        """Of every replica that serves; a lost one is left to its repair, and somebody must be left in the end."""

        async def one(seat: _Seat) -> None:
            try:
                await work(seat)
            except WeightsSuperseded as error:  # it writes on as it is: every token has the version that wrote it
                self._say(f"{seat.replica.name} keeps its weights: {one_line(error)}")
            except EngineLost as error:
                self._lose(seat, error)

        await gather_all(one(seat) for seat in self._seats if seat.up)
        await self._someone()

    async def _someone(self) -> None:
        """Waits until a replica serves; EngineError when none is left."""
        while not any(seat.up for seat in self._seats):
            if self.given_up:
                raise EngineError(self.given_up)
            repairs = [seat.repair for seat in self._seats if seat.repair is not None]
            await asyncio.wait(repairs, return_when=asyncio.FIRST_COMPLETED)

    # --- health -----------------------------------------------------------------------------------------------------

    def _start_watch(self) -> None:
        if self._closed:
            return
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_replicas())
        elif self._watch.done():
            self._watch.result()  # nobody is looked after any more: who asks next hears why

    async def _watch_replicas(self) -> None:
        """A replica that hangs or died while nobody asked it is found here."""
        while True:
            await asyncio.sleep(self._health_seconds)
            serving = [seat for seat in self._seats if seat.up]
            for seat, well in zip(serving, await gather_all(seat.replica.healthy() for seat in serving), strict=True):
                if not well:
                    self._lose(seat, EngineLost(seat.replica.problem or "it does not answer"))

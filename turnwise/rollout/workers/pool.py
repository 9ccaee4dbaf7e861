"""The run's side of its episode workers: who plays what, turns written for them, a new one for each that is lost."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from turnwise.errors import EngineError, EngineLost, TurnwiseError, one_line
from turnwise.rollout.plugin_calls import to_the_end
from turnwise.rollout.workers.hosts import POLL_SECONDS, Host, Hosts
from turnwise.rollout.workers.link import LinkLost
from turnwise.rollout.workers.messages import (
    Ask,
    Cancel,
    Drawn,
    End,
    Finished,
    MadeRows,
    Play,
    Played,
    Raised,
    Ready,
    Release,
    Setup,
    UnderWay,
    Waited,
    Withdraw,
)
from turnwise.rollout.workers.turns import WorkerTurns
from turnwise.storage import underway
from turnwise.storage.trajectories import made_rows
from turnwise.types import Sample, Trajectory

START_SECONDS = 300.0
"""For a worker to import, and to start what tools need."""
END_SECONDS = 20.0
"""For a worker to close what it opened."""
WAITED_SECONDS = 0.25
"""Between two words to a worker about turns that wait for a place."""
HANG_SECONDS = 120.0
"""Without a word from a worker: code of a tool or a user that holds its event loop as long would hold it for ever."""
MOST_LOSSES = 3
"""Workers that one group may cost."""

Done = Callable[[Finished], None]


@dataclass(slots=True, eq=False)
class PlayUnderWay:
    """A Play that a worker has, or that waits for one."""

    message: Play
    played: asyncio.Future[None]
    finished: asyncio.Future[Finished]
    losses: int = 0
    cancelled: bool = False

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for it."""
        for future in (self.played, self.finished):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen, also when nobody waits


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One process, and what it has under way."""

    host: Host
    turns: WorkerTurns | None
    """None where it asks a sampler itself."""
    plays: dict[int, PlayUnderWay] = field(default_factory=dict)
    without_rows: dict[int, list[Trajectory]] = field(default_factory=dict)
    """What it has sent and still makes rows of."""
    episodes: int = 0
    """Being played or scored."""
    heard: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """For messages."""
        return self.host.name

    def send(self, message: object) -> None:
        """Tell it something."""
        self.host.link.send(message)

    def take(self, play: PlayUnderWay) -> None:
        """Have it play this."""
        self.plays[play.message.number] = play
        self.episodes += len(play.message.siblings)
        self.send(play.message)

    def give_up(self, number: int) -> PlayUnderWay | None:
        """The play of this number, which it has no more."""
        if (play := self.plays.pop(number, None)) is not None:
            self.episodes -= len(play.message.siblings)
        return play

    def take_rows(self, rows: MadeRows) -> None:
        """Rows of groups that it has sent."""
        groups = {number: self.without_rows.pop(number, []) for number in rows.groups}
        if rows.content is not None and all(groups[number] for number in rows.made):
            made_rows.keep([each for number in rows.made for each in groups[number]], rows.content, rows.entries)


class WorkerPool:
    """So many episode workers. One that ends or stands still is replaced, and its groups are played again.

    A group is played by one worker. What is written does not depend on which: its noise is keyed by its place.
    """

    def __init__(self, setup: Setup, hosts: Hosts, say: Callable[[str], None]) -> None:
        self._setup, self._hosts, self._sampler, self._say = setup, hosts, hosts.sampler, say
        self._workers: list[WorkerProcess] = []
        self._listening: dict[WorkerProcess, asyncio.Task[None]] = {}
        self._waiting: list[PlayUnderWay] = []
        """Plays for which no worker was there."""
        self._restarting: set[asyncio.Task[None]] = set()
        self._telling: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._closed = False
        self._lost = 0
        self._failure: Exception | None = None
        """Why no worker is left."""

    async def start(self) -> None:
        """Start all of them, side by side; what keeps one from starting is raised. Some may come later."""
        started = [asyncio.create_task(self._started()) for _ in range(self._setup.workers)]
        try:
            notes = await self._hosts.begun(started)
        except BaseException:
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)
            await self.close()
            raise
        for note in notes:
            self._say(note)
        for task in started:
            if not task.done():
                self._later(task)
        self._telling = asyncio.create_task(self._look_after())

    async def play(
        self, sample: Sample, prompt: Sequence[int] | None, siblings: Sequence[int], step: int, drawn: Drawn
    ) -> PlayUnderWay:
        """Have siblings of a sample played; returns when they are, and may still be scored."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        message = Play(number, sample, prompt, tuple(siblings), step, drawn.split, drawn.sampling, drawn.scored)
        play = PlayUnderWay(message, loop.create_future(), loop.create_future())
        self._give(play)
        try:
            await play.played
        except asyncio.CancelledError:
            await to_the_end(self._cancel(play))
            raise
        return play

    async def finish(self, play: PlayUnderWay) -> Finished:
        """The episodes, once they are scored."""
        try:
            return await play.finished
        except asyncio.CancelledError:
            await to_the_end(self._cancel(play))
            raise

    @property
    def playing(self) -> int:
        """How many workers there are now."""
        return len(self._workers)

    def take_lost(self) -> int:
        """How many workers ended or stood still since this was last asked."""
        lost, self._lost = self._lost, 0
        return lost

    async def close(self) -> None:
        """End all of them; afterwards no process is left."""
        self._closed = True
        for task in (*self._restarting, *([] if self._telling is None else [self._telling])):
            task.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        await asyncio.gather(*(self._end(worker) for worker in self._workers))
        self._workers.clear()

    # --- one worker ---

    async def _started(self) -> Sequence[str]:
        """A new worker joins when it has loaded everything; what its tools said."""
        for left in reversed(range(self._hosts.tries)):
            try:
                worker, notes = await self._loaded(await self._hosts.make())
                break
            except EngineLost as error:
                if not left:
                    raise
                self._say(f"{error}; another one takes its place")
        self._workers.append(worker)
        self._listening[worker] = asyncio.create_task(self._listen(worker))
        while self._waiting:
            self._give(self._waiting.pop(0))
        return notes

    async def _loaded(self, host: Host) -> tuple[WorkerProcess, Sequence[str]]:
        try:
            host.link.send(self._setup)
            try:
                async with asyncio.timeout(START_SECONDS):
                    first = await _first(host)
            except TimeoutError as error:
                raise EngineError(f"{host.name} was not ready after {START_SECONDS:g} s") from error
            except LinkLost as error:
                raise EngineLost(f"{host.name} ended while it started: {await host.reaped()}") from error
            if isinstance(first, Raised):
                raise first.error
        except BaseException:
            host.kill()
            self._hosts.left(host)
            await to_the_end(host.reaped())
            raise
        turns = None if self._sampler is None else WorkerTurns(self._sampler, host.link)
        return WorkerProcess(host, turns), first.notes

    async def _listen(self, worker: WorkerProcess) -> None:
        """produces: answers to the worker's turns, results. waits for: its messages. unblocked by: its end."""
        try:
            while True:
                messages = await worker.host.link.receive()
                worker.heard = time.monotonic()
                for message in messages:
                    self._take(worker, message)
        except LinkLost:
            pass
        except Exception as error:  # of what it said something was not heard: who waits for it hears this
            for play in worker.plays.values():
                play.fail(error)
        if not self._closed:
            await self._replace(worker)

    def _take(self, worker: WorkerProcess, message: object) -> None:
        match message:
            case Ask() | Withdraw() | Release() if worker.turns is not None:
                worker.turns.take(message)
            case Played(number):
                if (play := worker.plays.get(number)) is not None and not play.played.done():
                    play.played.set_result(None)
            case Finished(number):
                if (play := worker.give_up(number)) is not None and not play.finished.done():
                    play.finished.set_result(message)
                    if play.message.scored:
                        worker.without_rows[number] = message.trajectories
            case MadeRows():
                worker.take_rows(message)
            case Raised(number, error):
                if (play := worker.give_up(number)) is not None:
                    play.fail(error)
            case UnderWay(episodes):  # also the sign that it lives
                underway.seen_elsewhere(worker, episodes)

    async def _look_after(self) -> None:
        """Tell workers which turns still wait for a place, which is not their episodes' time; end one that hangs."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(WAITED_SECONDS)
            now, behind = time.monotonic(), time.monotonic() - before
            before = now
            for worker in self._workers:
                if behind > HANG_SECONDS / 10:  # we stood still: what it said meanwhile is not read yet
                    worker.heard = now
                if now - worker.heard > HANG_SECONDS:
                    self._say(f"{worker.name} has not been heard of for {HANG_SECONDS:g} s: it is ended")
                    worker.host.kill()
                if worker.turns is not None and (waits := worker.turns.waits()):
                    worker.send(Waited(waits))

    # --- losing one ---

    async def _replace(self, worker: WorkerProcess) -> None:
        """Its groups go to the others at once, and to the one that takes its place."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        del self._listening[worker]
        underway.seen_elsewhere(worker, None)
        worker.host.kill()
        self._hosts.left(worker.host)
        words = await worker.host.reaped()
        self._lost += 1
        self._say(f"{worker.name} was lost ({words}): its {len(worker.plays)} groups are played again")
        if worker.turns is not None:
            await worker.turns.release()
        self._later(asyncio.create_task(self._started()))
        for play in list(worker.plays.values()):
            play.losses += 1
            if play.finished.done():
                continue
            if play.cancelled:
                play.fail(asyncio.CancelledError())
            elif play.losses >= MOST_LOSSES:
                sample = play.message.sample.id
                play.fail(TurnwiseError(f"sample {sample}: {MOST_LOSSES} episode workers ended with it ({words})"))
            else:
                self._give(play)

    def _later(self, starting: "asyncio.Task[Sequence[str]]") -> None:
        """A worker joins when it can. One that cannot leaves its groups to the others; the run ends with the last."""
        joining = asyncio.create_task(self._join(starting))
        self._restarting.add(joining)
        joining.add_done_callback(self._restarting.discard)

    async def _join(self, starting: "asyncio.Task[Sequence[str]]") -> None:
        try:
            await starting
        except Exception as error:
            left, of = len(self._workers), self._setup.workers
            self._say(f"no episode worker takes its place, {left} of {of} are left: {one_line(error)}")
            if not left and len(self._restarting) == 1:  # nobody else is about to start
                self._failure = error
                while self._waiting:
                    self._waiting.pop().fail(error)

    def _give(self, play: PlayUnderWay) -> None:
        """To the worker with the fewest episodes under way."""
        if self._failure is not None:
            play.fail(self._failure)
            return
        if not self._workers:
            self._waiting.append(play)
            return
        min(self._workers, key=lambda each: each.episodes).take(play)

    async def _cancel(self, play: PlayUnderWay) -> None:
        """Break it off, and wait until the worker has closed what it had open."""
        number, play.cancelled = play.message.number, True
        if play in self._waiting:
            self._waiting.remove(play)
        for worker in self._workers:
            if number in worker.plays:
                worker.send(Cancel(number))
        while any(number in worker.plays for worker in self._workers):
            await asyncio.sleep(POLL_SECONDS)

    async def _end(self, worker: WorkerProcess) -> None:
        self._listening.pop(worker).cancel()
        if worker.turns is not None:
            worker.turns.cancel()
        worker.send(End())
        with contextlib.suppress(LinkLost, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await worker.host.link.drain()
                await worker.host.ended()
        worker.host.kill()
        self._hosts.left(worker.host)
        await worker.host.reaped()


async def _first(host: Host) -> Ready | Raised:
    """What became of the Setup; before that it may have said that it lives."""
    while True:
        for message in await host.link.receive():
            if isinstance(message, Ready | Raised):
                return message

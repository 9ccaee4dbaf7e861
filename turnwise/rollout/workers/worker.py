"""An episode worker: its own interpreter and event loop, tools, users and scorers; it asks the run for every turn."""

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from turnwise.config import SamplingConfig
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.request import Request
from turnwise.engines.samplers.sampler import Capabilities, Sampler
from turnwise.engines.weight_updates import Update
from turnwise.rollout.episode import RolloutContext, run_episode
from turnwise.rollout.prepare import Prepared, engine_context, prepare, token_context
from turnwise.rollout.workers.conversations import Told
from turnwise.rollout.workers.hosts import RunLink
from turnwise.rollout.workers.link import LinkLost, WorkerLink, sendable
from turnwise.rollout.workers.messages import (
    SETUP,
    Cancel,
    End,
    Finished,
    Play,
    Played,
    Raised,
    Ready,
    Release,
    SamplerTraits,
    Setup,
    UnderWay,
    Waited,
    Withdraw,
    Written,
)
from turnwise.rollout.workers.row_maker import RowMaker
from turnwise.scoring.event_loop_resources import take_counts
from turnwise.scoring.scorer import apply_all
from turnwise.storage import underway
from turnwise.system import children, resources, time_budget
from turnwise.system.concurrency import gather_all, rare_cycle_searches
from turnwise.types import Completion, Trajectory


class WorkerSampler(Sampler, Protocol):
    """A sampler that another process has."""

    def take(self, message: object) -> None:
        """What the run said that is not for the worker itself."""
        ...


class SamplerElsewhere:
    """Of a sampler, what an episode worker has no part in: the run does that."""

    def __init__(self, facts: SamplerTraits) -> None:
        self.context_length: int = facts.context_length
        self.capabilities: Capabilities = facts.capabilities

    async def publish(self, update: Update, version: int) -> None:
        """The run does that."""
        raise NotImplementedError("an episode worker publishes no weights")

    async def sleep(self) -> None:
        """The run does that."""
        raise NotImplementedError("an episode worker does not lend the sampler's memory")

    wake = sleep

    async def close(self) -> None:
        """The sampler is the run's, which closes it."""


class SamplerOfRun(SamplerElsewhere):
    """Implements `Sampler` for episodes: it has every turn written by the run's, which another process has."""

    def __init__(self, link: RunLink, facts: SamplerTraits) -> None:
        super().__init__(facts)
        self._link = link
        self._told = Told()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Written]] = {}
        self._waits: dict[int, float] = {}

    async def generate(self, request: Request) -> Completion:
        """Have the run's sampler write; what it raises is raised here."""
        number = next(self._numbers)
        future: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._waits[number] = 0.0
        self._link.send(self._told.ask(number, request))
        try:
            with time_budget.reported_wait(lambda: self._waits[number]):
                written = await future
                self._waits[number] = written.waited
            return written.completion
        except asyncio.CancelledError:
            self._link.send(Withdraw(number))
            raise
        finally:
            del self._asked[number], self._waits[number]

    def take(self, message: object) -> None:
        """What the run said about turns that were asked for."""
        match message:
            case Waited(seconds):
                self._waits |= {number: waited for number, waited in seconds.items() if number in self._waits}
            case Written(number):
                if (future := self._asked.get(number)) is not None and not future.done():
                    future.set_result(message)
            case Raised(number, error):
                if (future := self._asked.get(number)) is not None and not future.done():
                    future.set_exception(error)

    async def release(self, conversation: str) -> None:
        """Tell the run that the conversation is over."""
        self._told.forget(conversation)
        self._link.send(Release(conversation))


class EpisodeWorker:
    """Plays what it is told to play, until it is told to end or the run has ended."""

    def __init__(self, link: RunLink, setup: Setup, sampler: WorkerSampler | None) -> None:
        self._link, self._setup, self._config = link, setup, setup.config
        self._sampler = sampler
        self._prepared: dict[str, Prepared] = {}
        self._contexts: dict[tuple[str, str], RolloutContext] = {}
        self._plays: dict[int, asyncio.Task[None]] = {}
        self._rows = RowMaker(link)
        self._stack = AsyncExitStack()

    async def run(self) -> None:
        """Until the end; everything that was opened is closed."""
        notes: list[str] = []
        async with self._stack, _watched(self._link, self._setup.watched):
            try:
                self._prepare()
                for number, prepared in enumerate(self._prepared.values()):
                    say = notes.append if not number else lambda text: None
                    await self._stack.enter_async_context(prepared.running(say))
            except Exception as error:
                self._link.send(Raised(SETUP, sendable(error)))
                await self._link.drain()
                return
            self._link.send(Ready(notes))
            with rare_cycle_searches(), contextlib.suppress(LinkLost):
                await self._serve()
            await self._break_off()

    def _prepare(self) -> None:
        beside = None
        for split, samples in self._setup.samples.items():
            beside = self._prepared[split] = prepare(self._config, split, samples=samples, beside=beside)

    async def _serve(self) -> None:
        while True:
            for message in await self._link.receive():
                match message:
                    case Play():
                        self._plays[message.number] = asyncio.create_task(self._play(message))
                    case Cancel(number):
                        if number in self._plays:
                            self._plays[number].cancel()
                    case End():
                        return
                    case _ if self._sampler is not None:
                        self._sampler.take(message)

    async def _play(self, play: Play) -> None:
        """Every Play is answered, whatever becomes of it, but by a process that is ending."""
        try:
            prepared, context = self._prepared[play.split], await self._context(play.split, play.sampling)
            if play.prompt is not None and prepared.renderer is not None:
                tools = prepared.toolbox.schemas(prepared.plan.route(play.sample).tools)
                prepared.renderer.remember(play.sample.prompt, tools, play.prompt)
            episodes = (
                run_episode(play.sample, sibling=sibling, step=play.step, context=context) for sibling in play.siblings
            )
            trajectories: list[Trajectory] = await gather_all(episodes)
            self._link.send(Played(play.number))
            if play.scored:
                await apply_all(prepared.scoring.scorers[play.sample.data_source], trajectories)
            stats = prepared.scoring.runner.stats.split_off()
            self._link.send(Finished(play.number, trajectories, stats, take_counts()))
            if play.scored:
                self._rows.add(play.number, trajectories)
        except asyncio.CancelledError as error:
            self._link.send(Raised(play.number, sendable(error)))
            raise
        except BaseException as error:
            self._link.send(Raised(play.number, sendable(error)))
        finally:
            del self._plays[play.number]

    async def _context(self, split: str, sampling: SamplingConfig) -> RolloutContext:
        key = split, repr(sampling)
        if key not in self._contexts:
            prepared = self._prepared[split]
            if self._sampler is None:
                opened = engine_context(prepared, None, sampling, lambda text: None)
                self._contexts[key] = await self._stack.enter_async_context(opened)
            else:
                renderer = prepared.renderer or make_renderer(self._config)
                self._contexts[key] = token_context(prepared, renderer, self._sampler, sampling)
        return self._contexts[key]

    async def _break_off(self) -> None:
        tasks = list(self._plays.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _watched(link: RunLink, watched: bool) -> AsyncIterator[None]:
    """Tell the run now and then that we live, and what is being played where somebody looks on."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(underway.SECONDS)
            link.send(UnderWay(underway.shown(episodes.now()) if watched else {}))

    with underway.collecting() as episodes:
        telling = asyncio.create_task(tell())
        try:
            yield
        finally:
            telling.cancel()


async def _main(end: socket.socket) -> None:
    link = await WorkerLink.open(end)
    try:
        (setup,) = await link.receive()
        sys.path[:] = setup.path
        resources.share_among(setup.workers)
        sampler = None if setup.sampler is None else SamplerOfRun(link, setup.sampler)
        await EpisodeWorker(link, setup, sampler).run()
        await link.drain()
    except LinkLost:
        pass  # the run has ended: so do we
    finally:
        link.close()


def main(channel: int) -> None:
    """What the process runs. Ctrl-C is for the run, which says when we are to end."""
    children.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_main(socket.socket(fileno=channel)))

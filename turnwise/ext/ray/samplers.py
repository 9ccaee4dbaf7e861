"""Samplers in actors as the training loop sees them: each is a replica, and `Replicas` makes one sampler of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.engines.samplers.request import Request
from turnwise.engines.samplers.sampler import Capabilities
from turnwise.engines.weight_updates import FullWeights, Update, WeightsFolder
from turnwise.errors import EngineError, EngineLost, EpisodeError, WeightsSuperseded, one_line
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import Connection, NeedLost, Say, SearchPath, alone
from turnwise.ext.ray.learner import LearnerWeights
from turnwise.ext.ray.learner_actor import StaleWeights
from turnwise.ext.ray.messages import PackedOutcomes, PackedRequests, TurnOutcome
from turnwise.ext.ray.resource_needs import demands, in_words
from turnwise.ext.ray.sampler_actor import SAMPLER_CALLS, SamplerActor, SamplerFacts
from turnwise.ext.servers.images import SentImages
from turnwise.ext.servers.replicas import Replicas
from turnwise.types import Completion

PING_SECONDS = 60.0
"""For an actor to answer that it lives; its node may be busy."""

PUT_TRIES = 5
ACTOR = "its process"
WAIT_SHARE, SHORTEST_WAIT, LONGEST_WAIT = 0.01, 0.005, 0.25
LATELY = 0.05
"""The weight of one turn in what turns took lately."""
CLOSE_SECONDS = 30.0
"""For an actor to end its servers and remove its files."""
PAUSE_SECONDS = 1.0
"""Before an actor is made again that went away before it was ready."""

MakeActor = Callable[[], Any]
"""Makes an actor with the methods of SamplerActor."""


class ActorSampler:
    """One sampler on a node, as a `Replica`. `start` comes first; until then nothing is known of it.

    Requests that come while a message is on its way go with the next one, and so do results. A message also waits for
    more of them, a hundredth of the time that turns take here: it costs as much CPU as several turns.
    """

    capabilities: Capabilities
    context_length: int
    problem = ""

    def __init__(self, connection: Connection, make: MakeActor, number: int) -> None:
        self.name = f"sampler {number}"
        self.placed = False
        """Whether a node had room for it."""
        self._number = number
        self._connection = connection
        self._make = make
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

    async def start(self) -> SamplerFacts:
        """Make the actor and wait until its model is loaded: for as long as no node has room for it."""
        self.placed, self._actor = False, self._make()
        room, patiently = self._connection.room, self._connection.patiently
        self._sent.forget()
        with self._connection.calling(ACTOR):
            node = await patiently(
                self._actor.ping.remote(), lambda: f"{self.name} waits for a node with room: the cluster has {room()}"
            )
            self.placed = True
            self._watch(self._actor, self._connection.hang_seconds)
            facts: SamplerFacts = await patiently(
                self._actor.open.remote(), lambda: f"{self.name} still loads its model on {node}"
            )
        self._watch(self._actor, self._connection.silent_seconds)
        self.capabilities, self.context_length = _there(facts.capabilities), facts.context_length
        self.name = f"sampler {self._number} on {facts.node}"
        self._collecting = asyncio.create_task(self._collect(self._actor))
        return facts

    def _watch(self, actor: Any, limit: float) -> None:
        """One that stands still is ended, also while it loads its model: then it is lost as any other."""

        def silent(words: str) -> None:
            self._connection.say(f"{self.name} {words} and is ended")
            self._connection.kill(actor)

        self._connection.watchdog.watch(actor, limit, silent)

    def _present(self) -> Any:
        """The actor; EngineLost between the end of one and the start of another."""
        if self._actor is None:
            raise EngineLost(f"{self.name} is not there")
        return self._actor

    async def generate(self, request: Request) -> Completion:
        """Continue a sequence; see the Sampler protocol."""
        self._present()
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

    async def publish(self, update: Update, version: int) -> None:
        """Have the actor fetch the weights; this process does not touch them."""
        actor = self._present()
        if not isinstance(update, LearnerWeights):
            raise EngineError(f"samplers of a cluster take weights of its object store, not {type(update).__name__}")
        for _ in range(PUT_TRIES):
            try:
                parts = await update.parts()
            except EngineLost as error:
                if isinstance(error.__cause__, StaleWeights):
                    raise WeightsSuperseded(str(error)) from error
                raise
            try:
                with self._connection.calling(ACTOR):
                    await actor.publish.remote(update.plan.shapes, parts, version)
                return
            except NeedLost:
                update.put_again(parts)  # they went with the node that had them
        raise EngineLost(f"{self.name} finds no weights of version {version}")

    async def sleep(self) -> None:
        with self._connection.calling(ACTOR):
            await self._present().sleep.remote()

    async def wake(self) -> None:
        with self._connection.calling(ACTOR):
            await self._present().wake.remote()

    async def close(self) -> None:
        """End the actor, which removes its files first if it still can; what is pending fails."""
        actor, alive = self._actor, self._collecting is not None and not self._collecting.done()
        try:
            if actor is not None and alive:
                with contextlib.suppress(TimeoutError, EngineLost):
                    async with asyncio.timeout(CLOSE_SECONDS):
                        with self._connection.calling(ACTOR):
                            await actor.close.remote()
        finally:
            self._end(EngineError("the sampler is closed"))

    def _end(self, error: EngineError) -> None:
        """End the actor at once; who waits for it hears this."""
        actor, self._actor = self._actor, None
        if actor is not None:
            self._connection.kill(actor)
        for task in (self._collecting, self._sending):
            if task is not None:
                task.cancel()
        self._fail(error)

    async def healthy(self) -> bool:
        """Whether the actor answers a ping."""
        if self._actor is None or self._collecting is None or self._collecting.done():
            return False
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self._actor.ping.remote()
        except (TimeoutError, self._connection.ray.exceptions.RayError):
            return False
        return True

    async def restart(self) -> None:
        """Another actor instead, on whichever node has room."""
        self._end(EngineLost("its process is restarted"))
        await self.start()

    async def restart_later(self) -> SamplerFacts:
        """Starts the actor anew after a pause."""
        await asyncio.sleep(PAUSE_SECONDS)
        self._end(EngineLost("its process is restarted"))
        return await self.start()

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
                with self._connection.calling(ACTOR):
                    packed = PackedRequests.of(wanted, self._sent.new(images))
                    lacking = await self._actor.submit.remote(packed, dropped, freed)
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
                with self._connection.calling(ACTOR):
                    packed: PackedOutcomes = await actor.collect.remote(self._gathering_seconds)
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


def _there(own: Capabilities) -> Capabilities:
    """What a sampler behind an actor can do: the actor makes files of weights for one that takes only those."""
    takes = own.updates & {FullWeights, WeightsFolder}
    return replace(own, updates=frozenset({FullWeights}) if takes else frozenset())


class ClusterSamplers(Replicas):
    """Samplers on the nodes of a cluster, used as one."""

    publish_seconds = 0.0
    """What the last update took, until the last sampler had it."""

    async def publish(self, update: Update, version: int) -> None:
        start = time.perf_counter()
        await super().publish(update, version)
        self.publish_seconds = time.perf_counter() - start


@asynccontextmanager
async def open_samplers(
    connection: Connection, config: Config, say: Say, *, training: bool = False
) -> AsyncIterator[tuple[ClusterSamplers, SamplerFacts]]:
    """`ray.samplers` copies of the configured engine behind one sampler; closed on every path.

    It begins with those that are there soon after the first one; the others join as they come, and who has not come
    within `ray.wait_seconds` is named.
    """
    chosen, asked = section(config, RayConfig), in_words(demands(config, training=training))
    path, theirs = SearchPath.here(), alone(config)
    make = connection.actor(
        SamplerActor,
        cpus=chosen.sampler_cpus,
        gpus=chosen.sampler_gpus,
        concurrency=SAMPLER_CALLS,
        scheduling_strategy="SPREAD",
    )
    replicas = [ActorSampler(connection, lambda: make(path, theirs), number + 1) for number in range(chosen.samplers)]
    starting = {asyncio.create_task(replica.start()): replica for replica in replicas}
    joining: set[asyncio.Task[None]] = set()
    pool: ClusterSamplers | None = None
    began = time.monotonic()
    try:
        first = await connection.first(
            starting,
            lambda: any(replica.placed for replica in replicas),
            f"a sampler (ray.sampler_cpus={chosen.sampler_cpus:g}, sampler_gpus={chosen.sampler_gpus:g})",
            asked,
        )
        if placed := {
            task for task, replica in starting.items() if replica.placed
        }:  # conversations stay where they begin
            await asyncio.wait(placed, timeout=min(time.monotonic() - began, chosen.wait_seconds))
        ready = [replica for task, replica in starting.items() if task.done() and task.exception() is None]
        pool = ClusterSamplers(ready, say)
        for note in first.notes:
            say(note)
        say(_words(ready, chosen.samplers))
        joining = {
            asyncio.create_task(_join(pool, task, replica, say))
            for task, replica in starting.items()
            if replica not in ready
        }
        yield pool, first
    finally:
        for running in (*joining, *starting):
            running.cancel()
        await asyncio.gather(*joining, *starting, return_exceptions=True)
        if pool is not None:
            await asyncio.shield(asyncio.ensure_future(pool.close()))
        for replica in replicas:
            await replica.close()


def _words(ready: list[ActorSampler], wanted: int) -> str:
    named = ", ".join(sampler.name for sampler in ready)
    more = "" if len(ready) == wanted else f"; {wanted - len(ready)} more join when they are ready"
    return f"{len(ready)} of {wanted} sampler(s) are running: {named}{more}"


async def _join(pool: Replicas, start: "asyncio.Task[SamplerFacts]", replica: ActorSampler, say: Say) -> None:
    """A sampler that was not there at first."""
    waiting: asyncio.Future[SamplerFacts] = start
    while True:
        try:
            await waiting
            await pool.add(replica)
            break
        except EngineLost as error:  # its node left again before it was ready
            say(f"{replica.name}: {error}")
            waiting = asyncio.ensure_future(replica.restart_later())
        except Exception as error:  # whatever it was, also in a user's engine: nobody else would hear of it
            say(f"{replica.name} is given up: {one_line(error)}")
            await replica.close()
            return
    if replica.name in pool.names:  # else it has been said why not
        say(f"{replica.name} joined")

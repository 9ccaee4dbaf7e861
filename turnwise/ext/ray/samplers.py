"""Samplers in actors as the training loop sees them: each is a replica, and `Replicas` makes one sampler of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.engines.devices import episode_workers
from turnwise.engines.samplers.sampler import Capabilities
from turnwise.engines.weight_updates import FullWeights, Update, WeightsFolder
from turnwise.errors import EngineError, EngineLost, WeightsSuperseded, one_line
from turnwise.ext.ray.calls import NeedLost
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import Connection, Say, SearchPath, alone
from turnwise.ext.ray.learner import LearnerWeights
from turnwise.ext.ray.learner_actor import StaleWeights
from turnwise.ext.ray.resource_needs import demands, in_words
from turnwise.ext.ray.sampler_actor import SAMPLER_CALLS, SamplerActor, SamplerFacts
from turnwise.ext.ray.sampler_calls import ACTOR, SamplerCalls
from turnwise.ext.servers.replicas import Replicas

PING_SECONDS = 60.0
"""For an actor to answer that it lives; its node may be busy."""

PUT_TRIES = 5
RUN = "run"
"""The process of the loop, for samplers that others ask too."""
CLOSE_SECONDS = 30.0
"""For an actor to end its servers and remove its files."""
PAUSE_SECONDS = 1.0
"""Before an actor is made again that went away before it was ready."""

MakeActor = Callable[[], Any]
"""Makes an actor with the methods of SamplerActor."""


class ActorSampler(SamplerCalls):
    """One sampler on a node, as a `Replica`. `start` comes first; until then nothing is known of it."""

    capabilities: Capabilities
    context_length: int
    node_id = ""
    problem = ""

    def __init__(self, connection: Connection, make: MakeActor, number: int) -> None:
        super().__init__(connection.ray, f"sampler {number}", RUN)
        self.placed = False
        """Whether a node had room for it."""
        self._number, self._starts = number, 0
        self._connection = connection
        self._make = make

    @property
    def key(self) -> tuple[int, int]:
        """Which sampler it is, and the how manieth actor of it."""
        return self._number, self._starts

    @property
    def actor(self) -> Any:
        """The actor, for others who ask it for turns."""
        return self._present()

    async def start(self) -> SamplerFacts:
        """Make the actor and wait until its model is loaded: for as long as no node has room for it."""
        self.placed, self._actor = False, self._make()
        self._starts += 1
        room, patiently = self._connection.room, self._connection.patiently
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
        self.node_id = facts.node_id
        self._begin(self._actor)
        return facts

    def _watch(self, actor: Any, limit: float) -> None:
        """One that stands still is ended, also while it loads its model: then it is lost as any other."""

        def silent(words: str) -> None:
            self._connection.say(f"{self.name} {words} and is ended")
            self._connection.kill(actor)

        self._connection.watchdog.watch(actor, limit, silent)

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

    async def forget_client(self, name: str) -> None:
        """Nobody waits for the turns of this one any more."""
        with contextlib.suppress(EngineLost), self._connection.calling(ACTOR):
            await self._present().leave.remote(name)

    async def close(self) -> None:
        """End the actor, which removes its files first if it still can; what is pending fails."""
        actor, alive = self._actor, self.collects
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
        if (actor := self._stop(error)) is not None:
            self._connection.kill(actor)

    async def healthy(self) -> bool:
        """Whether the actor answers a ping."""
        if self._actor is None or not self.collects:
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


def _there(own: Capabilities) -> Capabilities:
    """What a sampler behind an actor can do: the actor makes files of weights for one that takes only those."""
    takes = own.updates & {FullWeights, WeightsFolder}
    return replace(own, updates=frozenset({FullWeights}) if takes else frozenset())


class ClusterSamplers(Replicas):
    """Samplers on the nodes of a cluster, used as one."""

    publish_seconds = 0.0
    """What the last update took, until the last sampler had it."""

    def __init__(self, replicas: Sequence[ActorSampler], say: Say, **options: float) -> None:
        super().__init__(replicas, say, **options)
        self.watchers: set[Callable[[], None]] = set()
        """Told when a sampler serves or does not any more."""

    def tell(self, watcher: Callable[[], None]) -> None:
        """Have somebody know who serves, who asks samplers without us: from now on they are looked after."""
        self._start_watch()
        self.watchers.add(watcher)

    async def publish(self, update: Update, version: int) -> None:
        start = time.perf_counter()
        await super().publish(update, version)
        self.publish_seconds = time.perf_counter() - start

    @property
    def serving(self) -> list[ActorSampler]:
        """Those that have the latest weights."""
        return [seat.replica for seat in self._seats if seat.up and isinstance(seat.replica, ActorSampler)]

    def suspect(self, key: tuple[int, int], problem: str) -> None:
        """Somebody else who asks this sampler had no answer: it is looked after as if we had none."""
        for seat in self._of(key):
            self._lose(seat, EngineLost(problem))

    def wrote(self, key: tuple[int, int]) -> None:
        """Somebody else has had a turn of it."""
        for seat in self._of(key):
            seat.restarts = 0

    def _of(self, key: tuple[int, int]) -> list[Any]:
        return [seat for seat in self._seats if isinstance(seat.replica, ActorSampler) and seat.replica.key == key]

    def _moved(self) -> None:
        super()._moved()
        for tell in list(self.watchers):
            tell()


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
        concurrency=SAMPLER_CALLS + 3 * episode_workers(config),  # each asks, collects and may leave
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

"""Episode workers in actors of the cluster, as the run sees them: each beside the samplers that it asks."""

import asyncio
import contextlib
import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.engines.devices import episode_workers
from turnwise.errors import EngineLost, one_line
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import Connection, SearchPath, joined
from turnwise.ext.ray.resource_needs import demands, in_words
from turnwise.ext.ray.roster import Roster, RosterEntry, SamplerSuspected, SamplerWrote, shares
from turnwise.ext.ray.samplers import ActorSampler, ClusterSamplers
from turnwise.ext.ray.watchdog import ask_beat
from turnwise.ext.ray.worker_actor import WORKER_CALLS, EpisodeActor
from turnwise.rollout.workers.hosts import Host
from turnwise.rollout.workers.link import LinkLost
from turnwise.rollout.workers.messages import Ready

GATHERING_SECONDS = 0.02
"""That finished groups wait for others: a call costs the run as much as several of them."""
MOST_TRIES = 5
ACTOR = "its process"


class ActorLink:
    """The run's end of the link to a worker's actor: one call at a time each way, so that nothing is overtaken."""

    def __init__(
        self, connection: Connection, actor: Any, hear: Callable[[SamplerSuspected | SamplerWrote], None]
    ) -> None:
        self._connection, self._actor, self._hear = connection, actor, hear
        self._outbox: list[object] = []
        self._roster: Roster | None = None
        self._sending: asyncio.Task[None] | None = None
        self._begun = False
        self.ready: Callable[[], None] = lambda: None
        """Called when the worker has opened all that it needs."""
        self.problem = ""
        """Why it broke."""

    def send(self, message: object) -> None:
        """It goes with whatever else is there when the call before has ended."""
        self._outbox.append(message)
        self._begun = True
        self._send()

    def show(self, roster: Roster) -> None:
        """Known to the worker before any message that is sent from now on."""
        self._roster = roster
        if self._begun:
            self._send()

    def _send(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._outbox or self._roster is not None:
            messages, self._outbox = self._outbox, []
            roster, self._roster = self._roster, None
            content = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
            try:
                with self._connection.calling(ACTOR):
                    await self._actor.deliver.remote(content, roster)
            except (EngineLost, RuntimeError) as error:  # what it was told is lost: so is it, which `receive` tells
                self.problem = self.problem or one_line(error)
                self._connection.kill(self._actor)
                return

    async def receive(self) -> list[Any]:
        """The next messages; LinkLost when there will be none."""
        try:
            with self._connection.calling(ACTOR):
                content: bytes = await self._actor.collect.remote(GATHERING_SECONDS)
        except (EngineLost, RuntimeError) as error:
            self.problem = self.problem or one_line(error)
            raise LinkLost from error
        if not content:
            self.problem = self.problem or "it ended"
            raise LinkLost
        messages: list[Any] = pickle.loads(content)
        for message in messages:
            if isinstance(message, SamplerSuspected | SamplerWrote):
                self._hear(message)
            elif isinstance(message, Ready):
                self.ready()
        return [message for message in messages if not isinstance(message, SamplerSuspected | SamplerWrote)]

    async def drain(self) -> None:
        """Until the actor has all messages."""
        if self._sending is not None:
            await asyncio.shield(self._sending)

    def close(self) -> None:
        """Nothing more is sent."""
        self._outbox.clear()
        if self._sending is not None:
            self._sending.cancel()


class ActorHost:
    """An actor with a worker. Implements `Host`."""

    def __init__(self, connection: Connection, actor: Any, place: int, client: str, node: str, link: ActorLink) -> None:
        self.name = f"episode worker {place + 1} on {node}"
        self.place, self.client, self.link = place, client, link
        self._connection, self._actor = connection, actor
        self._watch(connection.hang_seconds)
        link.ready = lambda: self._watch(connection.silent_seconds)

    def kill(self) -> None:
        """The actor; what it started ends with it."""
        self._connection.kill(self._actor)

    async def ended(self) -> str:
        """Nothing that it still says is heard."""
        with contextlib.suppress(LinkLost):
            while True:
                await self.link.receive()
        return self.link.problem

    async def reaped(self) -> str:
        """It was told to end or killed."""
        self.link.close()
        words = self.link.problem or "it was ended"
        self.kill()
        return words

    def _watch(self, limit: float) -> None:
        """One that stands still is killed: then it is lost as any other."""

        def silent(words: str) -> None:
            self.link.problem = words
            self._connection.say(f"{self.name} {words} and is ended")
            self.kill()

        self._connection.watchdog.watch(self._actor, limit, silent)


class ClusterHosts:
    """Actors on the nodes of the cluster. Implements `Hosts`: nobody writes turns for them, they ask samplers."""

    sampler = None
    tries = MOST_TRIES

    def __init__(self, config: Config, samplers: ClusterSamplers | None) -> None:
        self._config, self._samplers = config, samplers
        self._hosts: list[ActorHost] = []
        self._taken: set[int] = set()
        """Places of those that are there or starting."""
        self._placed = False
        self._numbers = itertools.count()
        self._forgetting: set[asyncio.Task[None]] = set()
        self._path = SearchPath.here()

    async def make(self) -> ActorHost:
        """One on the node of its samplers if there is room, else on another; waits while none has room."""
        connection = await joined(section(self._config, RayConfig))
        place = next(n for n in itertools.count() if n not in self._taken)
        self._taken.add(place)
        client = f"worker {place + 1} {next(self._numbers)}"
        actor, name = self._actor(connection, place)(self._path, client), f"episode worker {place + 1}"
        try:
            with connection.calling(name):
                await connection.patiently(
                    ask_beat(actor), lambda: f"{name} waits for a node with room: the cluster has {connection.room()}"
                )
                self._placed = True
                node: str = await actor.where.remote()
        except BaseException:
            self._taken.discard(place)
            connection.kill(actor)
            raise
        host = ActorHost(connection, actor, place, client, node, ActorLink(connection, actor, self._heard))
        if self._samplers is not None:
            self._samplers.tell(self._show_all)
        self._hosts.append(host)
        self._show_all()
        return host

    async def begun(self, starting: "Sequence[asyncio.Task[Sequence[str]]]") -> Sequence[str]:
        """When the first is there, and those that come as soon after it again."""
        connection, began = await joined(section(self._config, RayConfig)), time.monotonic()
        asked = in_words(demands(self._config, training=False))
        first = await connection.first(starting, lambda: self._placed, "an episode worker (ray.service_cpus)", asked)
        limit = min(time.monotonic() - began, connection.config.wait_seconds)
        done, _ = await asyncio.wait(starting, timeout=limit)
        for task in done:
            task.result()  # what keeps one of them from starting is raised
        where = ", ".join(host.name.removeprefix("episode worker ") for host in self._hosts)
        return [*first, f"{len(done)} of {len(starting)} episode worker(s) are running: {where}"]

    def left(self, host: Host) -> None:
        """Samplers forget its turns, and the others have its share of them."""
        if not isinstance(host, ActorHost) or host not in self._hosts:
            return
        self._hosts.remove(host)
        self._taken.discard(host.place)
        if self._samplers is None:
            return
        for sampler in self._samplers.serving:
            forgetting = asyncio.create_task(sampler.forget_client(host.client))
            self._forgetting.add(forgetting)
            forgetting.add_done_callback(self._forgetting.discard)
        if self._hosts:
            self._show_all()
        else:
            self._samplers.watchers.discard(self._show_all)

    def _actor(self, connection: Connection, place: int) -> Callable[..., Any]:
        beside_node = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        strategy: Any = "SPREAD"
        if samplers := self._in_order():
            beside = samplers[int((place + 0.5) * len(samplers) / episode_workers(self._config)) % len(samplers)]
            if beside.node_id:
                strategy = beside_node(beside.node_id, soft=True, _spill_on_unavailable=True)
        make: Callable[..., Any] = connection.actor(
            EpisodeActor,
            cpus=connection.config.service_cpus,
            gpus=0,
            concurrency=WORKER_CALLS,
            scheduling_strategy=strategy,
        )
        return make

    def _in_order(self) -> list[ActorSampler]:
        """Samplers that serve, those of a node side by side."""
        serving = [] if self._samplers is None else self._samplers.serving
        return sorted(serving, key=lambda sampler: (sampler.node_id, sampler.key))

    def _heard(self, message: SamplerSuspected | SamplerWrote) -> None:
        """What a worker says of a sampler."""
        if self._samplers is None:
            return
        if isinstance(message, SamplerWrote):
            self._samplers.wrote(message.key)
        else:
            self._samplers.suspect(message.key, message.problem)

    def _show_all(self) -> None:
        """Who serves, and whose share it is."""
        if self._samplers is None:
            return
        samplers, hosts = self._in_order(), sorted(self._hosts, key=lambda host: host.place)
        for number, host in enumerate(hosts):
            parts = shares(len(samplers), len(hosts), number)
            entries = [
                RosterEntry(one.key, one.name, one.actor, part) for one, part in zip(samplers, parts, strict=True)
            ]
            host.link.show(Roster(tuple(entries), self._samplers.given_up))

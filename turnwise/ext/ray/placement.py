"""What `cluster=ray` means: what is refused, where the engines are, who scores, and where sandboxes are."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from turnwise import extensions
from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.config.choices import ScoringRun
from turnwise.config.sections import section
from turnwise.engines.opener import LearnerParts, OpenPair, Say, opener_of
from turnwise.engines.publish_weights import check_trainable
from turnwise.engines.samplers.sampler import Sampler
from turnwise.errors import ConfigError
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import Connection, SearchPath, alone, check_address, cluster_connection, joined
from turnwise.ext.ray.episode_workers import ClusterHosts
from turnwise.ext.ray.learner import ActorLearner
from turnwise.ext.ray.learner_actor import LearnerActor, LearnerOrders
from turnwise.ext.ray.resource_needs import SERVICES, check_gpus_here, demands, in_words, sums
from turnwise.ext.ray.sampler_actor import SamplerFacts
from turnwise.ext.ray.samplers import ClusterSamplers, open_samplers
from turnwise.ext.ray.sandboxes import ClusterPool
from turnwise.ext.ray.scorers import ClusterRunner
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.opening import remote_pools
from turnwise.rollout.placement import Here, Layout
from turnwise.rollout.workers.hosts import Hosts
from turnwise.rollout.workers.images import Adopt
from turnwise.scoring.service import Runner, make_runner
from turnwise.storage.run_dir import run_folder


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """Everything in actors of a Ray cluster but the loop, tools and users."""

    config: Config

    @property
    def samples(self) -> bool:
        """An endpoint and a script are not on the cluster."""
        return bool(extensions.engine(self.config.engine.name).device)

    @property
    def _ray(self) -> RayConfig:
        return section(self.config, RayConfig)

    @property
    def _cpus(self) -> float:
        """What the run asks for at most."""
        return sums(demands(self.config, training=True))[0]

    @property
    def samplers(self) -> int:
        """The most samplers that there are at once."""
        return self._ray.samplers

    @property
    def sampler_gpus(self) -> float:
        """How many GPUs each sampler reserves."""
        return self._ray.sampler_gpus

    @property
    def learner_gpus(self) -> float:
        """What the learner or each of its ranks reserves."""
        return self._ray.learner_gpus

    def check(self, *, training: bool = False) -> None:
        """Also that Ray is there, and that what it is asked for can be."""
        config, ray = self.config, self._ray
        if find_spec("ray") is None:
            raise ConfigError("cluster=ray needs Ray: pip install 'turnwise[ray]'")
        check_address(ray.address)
        check_gpus_here(config, training=training)
        opener = opener_of(config)
        if (problem := opener.reserved_problem(config, ray.sampler_gpus, here=ray.address is None)) is not None:
            raise ConfigError(f"ray.sampler_gpus={ray.sampler_gpus:g}: {problem}")
        if opener.keeps_weights(config):  # every sampler would load weights under the turns of the others
            raise ConfigError(
                "servers.addresses: samplers of a cluster start their own; set one of servers.addresses and cluster"
            )
        if ray.samplers > 1 and not self.samples:
            raise ConfigError(f"ray.samplers={ray.samplers}: engine={config.engine.name} is not on the cluster")
        if ray.scorers and config.scoring.run is ScoringRun.http:
            raise ConfigError("ray.scorers: with scoring.run=http a server scores already; set one of the two")
        if ray.sandboxes and config.rollout.workers:
            raise ConfigError(
                "ray.sandboxes: each of rollout.workers runs sandboxes on its own node; set one of the two"
            )
        if ray.sandboxes and section(config, SandboxConfig).url is not None:
            raise ConfigError("ray.sandboxes: with sandbox.url a server runs the code already; set one of the two")

    def runner(self) -> Runner:
        """On the cluster where it has any scorers, else here."""
        if self._ray.scorers:
            return ClusterRunner(self._ray, self.config.scoring)
        return make_runner(self.config.scoring)

    @asynccontextmanager
    async def services(self, say: Say) -> AsyncIterator[None]:
        """Sandboxes are the cluster's where it has any, and its news are said."""
        cluster = self._ray
        pools: AbstractContextManager[None] = nullcontext()
        if cluster.sandboxes:
            pools = remote_pools(lambda sandbox, output: ClusterPool(cluster, sandbox, output))
        with pools:
            async with cluster_connection(cluster, say, self._cpus, self.config.learner.hang_seconds):
                yield

    def open_sampler(self, renderer: Renderer, say: Say) -> AbstractAsyncContextManager[Sampler]:
        """The samplers of an evaluation, as one."""
        if not self.samples:
            return Here(self.config).open_sampler(renderer, say)
        return open_pool(self.config, say)

    def open_pair(self, renderer: Renderer, parts: LearnerParts, say: Say) -> AbstractAsyncContextManager[OpenPair]:
        """Samplers and learner of a training; each actor makes a renderer of its own."""
        return open_pair(self.config, parts, say)

    def worker_hosts(self, sampler: Sampler | None, adopt: Adopt | None) -> Hosts:
        """In actors, which ask the samplers of the cluster without this process."""
        return ClusterHosts(self.config, sampler if isinstance(sampler, ClusterSamplers) else None)

    def plan_lines(self, *, training: bool) -> list[str]:
        """How many of each kind, and who stays here."""
        cluster, processes = self._ray, self.config.learner.processes
        where = "started on this machine" if cluster.address is None else f"at {cluster.address}"
        samplers = f"{cluster.samplers} sampler(s) of {cluster.sampler_cpus:g} CPUs and {cluster.sampler_gpus:g} GPUs"
        each = f"of {cluster.learner_cpus:g} CPUs and {cluster.learner_gpus:g} GPUs"
        learner = f", a learner {each}" if training else ""
        if training and processes > 1:
            learner = f", a learner of {processes} ranks {each}, on as few nodes as have room (FSDP2)"
        workers = self.config.rollout.workers
        services = {"scorers": cluster.scorers, "sandboxes": cluster.sandboxes}
        named = [f"{count} {name}" for name, count in services.items() if count]
        own = [name for name, count in services.items() if not count] + ["tools", "users"]
        if workers:  # of scorers those of extensions stay here
            named.append(f"{workers} episode workers beside the samplers with {', '.join(own)}")
        there, here = ", ".join(named), ", ".join(["the loop", *([] if workers else own)])
        return [
            f"cluster      {self.config.cluster} {where}: {samplers}{learner}",
            f"             {there + ' there, ' if there else ''}here: {here}",
        ]

    async def layout(self, *, training: bool) -> Layout | None:
        """As the cluster is now; nothing is placed."""
        connection = await joined(self._ray, self._cpus)
        return connection.layout(demands(self.config, training=training))

    async def no_services(self) -> str | None:
        """One of each kind of service must have room."""
        every = [demand for demand in demands(self.config, training=False) if demand.kind in SERVICES]
        connection = await joined(self._ray, self._cpus)
        return connection.layout([replace(demand, count=1) for demand in every]).lacking


@asynccontextmanager
async def open_pool(config: Config, say: Say) -> AsyncIterator[Sampler]:
    """The samplers of an evaluation, as one."""
    connection = await joined(section(config, RayConfig))
    async with open_samplers(connection, config, say) as (pool, _):
        yield pool


@asynccontextmanager
async def open_pair(config: Config, parts: LearnerParts, say: Say) -> AsyncIterator[OpenPair]:
    """Samplers and learner of a training, each in actors; all are ended on every path.

    The learner's place is reserved first: without it nothing can be trained, and samplers would take all there is.
    """
    every = demands(config, training=True)
    cpus, gpus = sums(every)
    connection = await joined(section(config, RayConfig), cpus)
    if connection.lacks(cpus, gpus):
        say(f"the run needs more than the cluster has and waits for nodes: {in_words(every)}; {connection.room()}")
    opening = open_samplers(connection, config, say, training=True)
    async with _reserved_learner(connection, config) as group, opening as (pool, facts):
        check_trainable(config.engine.name, pool.capabilities, lora=bool(config.learner.lora_rank))
        learner = ActorLearner(
            connection,
            lambda: _make(connection, config, parts, facts, group),
            say,
            config.learner.hang_seconds,
        )
        try:
            started = await asyncio.to_thread(learner.start)
            say(f"the learner is on {started.node}, computes on {started.device}")
            if config.learner.processes > 1 and (folder := run_folder()) is not None:
                await asyncio.to_thread(learner.shares, folder)  # raises before anything is learnt
            if facts.regime is not None and not started.exact and config.learner.processes == 1:
                say("the learner's machine differs from the sampler's: their log-probs agree only up to rounding")
            turns = bool(config.engine.sleep)
            metrics = ClusterMetrics(connection, pool, learner)
            yield OpenPair(pool, learner, started.exact, facts.threads, turns, metrics=metrics.take)
        finally:
            learner.close()


@asynccontextmanager
async def _reserved_learner(connection: Connection, config: Config) -> AsyncIterator[Any]:
    """A placement group for the learner: a bundle for each rank, on as few nodes as have room.

    A new learner gets it too, and Ray moves the bundles of a node that goes away.
    """
    chosen, util = section(config, RayConfig), connection.ray.util
    bundle = {"CPU": chosen.learner_cpus} | ({"GPU": chosen.learner_gpus} if chosen.learner_gpus else {})
    group = util.placement_group([bundle] * config.learner.processes, strategy="PACK")
    try:
        try:
            async with asyncio.timeout(chosen.wait_seconds):
                await group.ready()
        except TimeoutError as error:
            every = demands(config, training=True)
            raise connection.no_room(f"the {every[0]}", in_words(every)) from error
        yield group
    finally:
        util.remove_placement_group(group)


def _make(connection: Connection, config: Config, parts: LearnerParts, facts: SamplerFacts, group: Any) -> Any:
    orders = LearnerOrders(
        SearchPath.here(), alone(config), parts, facts.regime, facts.threads, facts.machine, facts.precision,
        section(config, RayConfig), group,
    )  # fmt: skip
    chosen = section(config, RayConfig)
    several = config.learner.processes > 1  # then it is with the first rank, and has no own room
    strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    make = connection.actor(
        LearnerActor,
        cpus=0 if several else chosen.learner_cpus,
        gpus=0 if several else chosen.learner_gpus,
        scheduling_strategy=strategy(group, placement_group_bundle_index=0),
    )
    return make(orders)


@dataclass(eq=False, slots=True)
class ClusterMetrics:
    """What a step's line says of the cluster."""

    connection: Connection
    pool: ClusterSamplers
    learner: ActorLearner

    def take(self) -> dict[str, float]:
        """Losses are counted from the start of the run."""
        lost = {f"cluster/{kind}_lost": float(count) for kind, count in self.connection.lost.items()}
        return {
            "cluster/samplers": float(len(self.pool.names)),
            "cluster/sampler_lost": float(self.pool.lost),
            "cluster/learner_lost": float(self.learner.losses),
            "timing_s/publish": self.pool.publish_seconds,
        } | lost

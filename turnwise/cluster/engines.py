"""The engines of a run in actors: samplers for an evaluation, samplers and a learner for a training."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from turnwise.cluster.asked import asked_of, in_words, sums
from turnwise.cluster.connection import Connection, Place, Say, alone, joined
from turnwise.cluster.learner import ActorLearner
from turnwise.cluster.learner_actor import LearnerActor, LearnerOrders
from turnwise.cluster.sampler_actor import SamplerFacts
from turnwise.cluster.samplers import ClusterSamplers, open_samplers
from turnwise.config import Config
from turnwise.engines.opening import LearnerParts, OpenEngines
from turnwise.engines.publishing import check_trainable
from turnwise.engines.samplers.sampler import Sampler
from turnwise.storage.run_dir import run_folder


@asynccontextmanager
async def open_sampler(config: Config, say: Say) -> AsyncIterator[Sampler]:
    """The samplers of an evaluation, as one."""
    connection = await joined(config.cluster)
    async with open_samplers(connection, config, say) as (pool, _):
        yield pool


@asynccontextmanager
async def open_engines(config: Config, parts: LearnerParts, say: Say) -> AsyncIterator[OpenEngines]:
    """Samplers and learner of a training, each in actors; all are ended on every path.

    The learner's place is reserved first: without it nothing can be trained, and samplers would take all there is.
    """
    connection = await joined(config.cluster, config.learner.processes)
    every = asked_of(config, training=True)
    cpus, gpus = sums(every)
    if connection.lacks(cpus, gpus):
        say(f"the run asks for more than there is now and waits for nodes: {in_words(every)}; {connection.room()}")
    opening = open_samplers(connection, config, say, training=True)
    async with _learner_place(connection, config) as group, opening as (pool, facts):
        check_trainable(config.engine.name, pool.capabilities, lora=bool(config.learner.lora_rank))
        learner = ActorLearner(
            connection, lambda: _make(connection, config, parts, facts, group), say, config.learner.hang_seconds
        )
        try:
            found = await asyncio.to_thread(learner.start)
            say(f"the learner is on {found.node}, computes on {found.device}")
            if config.learner.processes > 1 and (folder := run_folder()) is not None:
                await asyncio.to_thread(learner.shares, folder)  # raises before anything is learnt
            if facts.regime is not None and not found.exact and config.learner.processes == 1:
                say("the learner's machine is not like the sampler's: their log-probs agree to rounding only")
            turns = bool(config.engine.sleep)
            metrics = ClusterMetrics(connection, pool, learner)
            yield OpenEngines(pool, learner, found.exact, facts.threads, turns, metrics=metrics.take)
        finally:
            learner.close()


@asynccontextmanager
async def _learner_place(connection: Connection, config: Config) -> AsyncIterator[Any]:
    """A placement group for the learner: a bundle for each rank, on as few nodes as have room.

    A new learner gets it too, and Ray moves the bundles of a node that goes away.
    """
    chosen, util = config.cluster, connection.ray.util
    bundle = {"CPU": chosen.learner_cpus} | ({"GPU": chosen.learner_gpus} if chosen.learner_gpus else {})
    group = util.placement_group([bundle] * config.learner.processes, strategy="PACK")
    try:
        try:
            async with asyncio.timeout(chosen.wait_seconds):
                await group.ready()
        except TimeoutError as error:
            every = asked_of(config, training=True)
            raise connection.no_room(f"the {every[0]}", in_words(every)) from error
        yield group
    finally:
        util.remove_placement_group(group)


def _make(connection: Connection, config: Config, parts: LearnerParts, facts: SamplerFacts, group: Any) -> Any:
    orders = LearnerOrders(
        Place.here(), alone(config), parts, facts.regime, facts.threads, facts.machine, facts.precision, config.cluster,
        group,
    )  # fmt: skip
    chosen, several = (
        config.cluster,
        config.learner.processes > 1,
    )  # then it is with the first rank, and has no own room
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

"""The engines of a run in actors: samplers for an evaluation, samplers and a learner for a training."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from turnwise.cluster.connection import Connection, Place, Say, alone, joined
from turnwise.cluster.learner import ActorLearner
from turnwise.cluster.learner_actor import LearnerActor, LearnerOrders
from turnwise.cluster.sampler_actor import SamplerFacts
from turnwise.cluster.samplers import ClusterSamplers, open_samplers
from turnwise.config import Config
from turnwise.engines.opening import LearnerParts, OpenEngines
from turnwise.engines.publishing import check_trainable
from turnwise.engines.samplers.sampler import Sampler


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
    connection = await joined(config.cluster)
    async with _learner_place(connection, config) as strategy, open_samplers(connection, config, say) as (pool, facts):
        check_trainable(config.engine.name, pool.capabilities, lora=bool(config.learner.lora_rank))
        learner = ActorLearner(connection, lambda: _make(connection, config, parts, facts, strategy), say)
        try:
            found = await asyncio.to_thread(learner.start)
            say(f"the learner is on {found.node}, computes on {found.device}")
            if facts.regime is not None and not found.exact:
                say("the learner's machine is not like the sampler's: their log-probs agree to rounding only")
            turns = bool(config.engine.sleep)
            metrics = ClusterMetrics(connection, pool, learner)
            yield OpenEngines(pool, learner, found.exact, facts.threads, turns, metrics=metrics.take)
        finally:
            learner.close()


@asynccontextmanager
async def _learner_place(connection: Connection, config: Config) -> AsyncIterator[Any]:
    """A placement group for the learner, which a new one gets too; Ray moves it when its node goes away."""
    chosen, util = config.cluster, connection.ray.util
    bundle = {"CPU": chosen.learner_cpus} | ({"GPU": chosen.learner_gpus} if chosen.learner_gpus else {})
    group = util.placement_group([bundle], strategy="PACK")
    try:
        try:
            async with asyncio.timeout(chosen.wait_seconds):
                await group.ready()
        except TimeoutError as error:
            what = f"the learner (cluster.learner_cpus={chosen.learner_cpus:g}, learner_gpus={chosen.learner_gpus:g})"
            raise connection.no_room(what) from error
        strategies = import_module("ray.util.scheduling_strategies")
        yield strategies.PlacementGroupSchedulingStrategy(placement_group=group)
    finally:
        util.remove_placement_group(group)


def _make(connection: Connection, config: Config, parts: LearnerParts, facts: SamplerFacts, strategy: Any) -> Any:
    orders = LearnerOrders(
        Place.here(), alone(config), parts, facts.regime, facts.threads, facts.machine, facts.precision
    )
    chosen = config.cluster
    make = connection.actor(
        LearnerActor, cpus=chosen.learner_cpus, gpus=chosen.learner_gpus, scheduling_strategy=strategy
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

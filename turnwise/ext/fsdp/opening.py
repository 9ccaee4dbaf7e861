"""Opens a learner of several processes, alone or beside a sampler of this process: the table's `sharded` learner."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.config.choices import Precision
from turnwise.config.sections import section
from turnwise.engines.devices import published_format, rank_devices
from turnwise.engines.opener import LearnerParts, Say, model_source, small_picture
from turnwise.errors import ConfigError
from turnwise.ext.fsdp.config import FsdpConfig
from turnwise.ext.fsdp.rank_group import LocalRanks, Ranks
from turnwise.ext.fsdp.rank_setup import RankSetup

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.ext.fsdp.learner import ShardedLearner


def replicas(config: Config) -> int:
    """Whole copies of the learner's state; what does not divide its processes is a ConfigError."""
    copies, processes = section(config, FsdpConfig).replicas, config.learner.processes
    if processes % copies:
        raise ConfigError(
            f"fsdp.replicas={copies} does not divide learner.processes={processes}: each copy of the state is "
            "shared out over as many processes as the others"
        )
    if (processes // copies) % context(config):
        raise ConfigError(
            f"fsdp.context_parallel={context(config)} does not divide {processes // copies}, which is "
            "learner.processes / fsdp.replicas: as many processes of a copy share each sequence"
        )
    return copies


def context(config: Config) -> int:
    """Processes that share the tokens of each sequence."""
    return section(config, FsdpConfig).context_parallel


def how_shared(config: Config) -> str:
    """What the processes have each a part of, in words."""
    processes, copies, sequence = config.learner.processes, replicas(config), context(config)
    over = "them (FSDP2)" if copies == 1 else f"each {processes // copies} of them, {copies} replicas (HSDP)"
    shared = "" if sequence == 1 else f"; each {sequence} share the tokens of a sequence"
    return f"weights, gradients and moments shared out over {over}{shared}"


def read_whole(folder: Path) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """What the ranks of a learner wrote into a checkpoint, put together."""
    from turnwise.ext.fsdp import state

    return state.read_whole(folder)


def open_alone(config: Config, renderer: Renderer, parts: LearnerParts, say: Say) -> "ShardedLearner":
    """The learner of a fine-tuning, which has all GPUs. It must be closed."""
    return open_over_ranks(config, renderer, parts, local_ranks(config, samples=False), say)


@asynccontextmanager
async def open_beside(
    config: Config, renderer: Renderer, parts: LearnerParts, say: Say
) -> "AsyncIterator[ShardedLearner]":
    """The learner of a training, which leaves the sampler its GPU; its processes end with the block."""
    ranks = local_ranks(config, samples=True)
    try:
        published = published_format(config)
        yield await asyncio.to_thread(open_over_ranks, config, renderer, parts, ranks, say, published)
    finally:
        ranks.stop()


def local_ranks(config: Config, *, samples: bool) -> LocalRanks:
    """Processes of this machine that are not started yet; beside a sampler they leave it its GPU."""
    from turnwise.engines.samplers.cpu.threads import usable_cores

    devices = rank_devices(config, samples=samples)
    threads = (config.engine.threads or usable_cores()) // len(devices)
    return LocalRanks(devices, threads, config.learner.hang_seconds)


def open_over_ranks(
    config: Config,
    renderer: Renderer,
    parts: LearnerParts,
    ranks: Ranks,
    say: Say,
    published: Precision = Precision.float32,
) -> "ShardedLearner":
    """A learner over these ranks, which it starts; they are ended where that fails."""
    from turnwise.engines.model.policy_folder import PolicyFolder
    from turnwise.engines.open_in_process import implementation_of
    from turnwise.ext.fsdp.learner import ShardedLearner

    source = model_source(config)
    setup = RankSetup(
        source=source,
        implementation=implementation_of(config),
        learner=config.learner,
        temperature=config.sampling.temperature,
        seed=config.seed,
        updates=parts.updates,
        critic=parts.critic,
        reference=parts.reference,
        picture=None if renderer.images is None else renderer.images.prepare(small_picture()),
        replicas=replicas(config),
        context=context(config),
        published=published.value,
    )
    companions = PolicyFolder.of(source, renderer.tokenizer, renderer.stop_ids)
    learner = ShardedLearner(ranks, setup, companions=companions, base_model=source.base)
    say(f"sharded learner: {ranks.size} processes; its log-probs are the sampler's up to rounding")
    return learner

"""Opens a learner of several processes, alone or beside a sampler of this process."""

from typing import TYPE_CHECKING

from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.engines.devices import rank_devices
from turnwise.engines.memory_plan import MemoryPlan
from turnwise.engines.opened import LearnerParts, Say, model_source, small_picture
from turnwise.engines.opening_learner import implementation_of, open_learner

if TYPE_CHECKING:
    from turnwise.engines.learners.local import LocalLearner
    from turnwise.engines.learners.rank_group import LocalRanks, Ranks
    from turnwise.engines.learners.sharded import ShardedLearner


def open_chosen_learner(
    config: Config, renderer: Renderer, parts: LearnerParts, *, memory: MemoryPlan | None, say: Say
) -> "LocalLearner | ShardedLearner":
    """The learner of a fine-tuning: in this process, or in as many as `learner.processes` says. It must be closed."""
    if config.learner.processes == 1:
        return open_learner(config, renderer, parts, memory=memory, say=say)
    ranks = make_ranks(config, samples=False)
    return open_sharded(config, renderer, parts, ranks, say)


def make_ranks(config: Config, *, samples: bool = True) -> "LocalRanks":
    """Processes of this machine that are not started yet; beside a sampler they leave it its GPU."""
    from turnwise.engines.learners.rank_group import LocalRanks
    from turnwise.engines.samplers.threads import usable_cores

    devices = rank_devices(config, samples=samples)
    threads = (config.engine.threads or usable_cores()) // len(devices)
    return LocalRanks(devices, threads, config.learner.hang_seconds)


def open_sharded(config: Config, renderer: Renderer, parts: LearnerParts, ranks: "Ranks", say: Say) -> "ShardedLearner":
    """A learner over these ranks, which it starts; they are ended where that fails."""
    from turnwise.engines.learners.rank_setup import RankSetup
    from turnwise.engines.learners.sharded import ShardedLearner
    from turnwise.engines.model.policy_folder import PolicyFolder

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
    )
    companions = PolicyFolder.of(source, renderer.tokenizer, renderer.stop_ids)
    learner = ShardedLearner(ranks, setup, companions=companions, base_model=source.base)
    say(f"sharded learner: {ranks.size} processes; its log-probs are the sampler's up to rounding")
    return learner

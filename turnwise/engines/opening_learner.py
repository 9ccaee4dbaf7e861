"""Opens the learner of a config: all weights or LoRA, with a critic and a reference where they are needed."""

import warnings
from typing import TYPE_CHECKING

from turnwise.chat.renderer import Renderer
from turnwise.choices import ModelImplementation, Precision
from turnwise.config import Config
from turnwise.engines.devices import Chosen, choose
from turnwise.engines.memory_plan import MemoryPlan
from turnwise.engines.opened import LearnerParts, Say, model_source, read_policy

if TYPE_CHECKING:
    from turnwise.engines.learners.local import LocalLearner
    from turnwise.engines.model.attention import Regime
    from turnwise.engines.model.policy_model import PolicyModel


def open_learner(
    config: Config,
    renderer: Renderer,
    parts: LearnerParts,
    *,
    regime: "Regime | None" = None,
    model: "PolicyModel | None" = None,
    memory: MemoryPlan | None = None,
    say: Say | None = None,
) -> "LocalLearner":
    """The learner of a config: all weights or LoRA. `regime` is the sampler's, where it is proven; `model` is what it
    trains, where the caller has read it already. `memory` bounds what its passes take of a GPU, and `say` hears when
    they must become smaller."""
    from turnwise.engines.learners.critic import Critic
    from turnwise.engines.learners.local import LocalLearner
    from turnwise.engines.model.loading import add_lora, train_vision
    from turnwise.engines.model.policy_folder import PolicyFolder

    chosen, source = config.learner, model_source(config)
    model, critic = model or read_policy(config, Precision.float32), None
    if chosen.train_vision:
        train_vision(model)
    if parts.critic:  # before LoRA is added: all weights of a critic's own trunk are trained
        critic = Critic.sharing(model) if chosen.shared_critic else Critic.copying(model)
    if chosen.lora_rank:
        model = add_lora(model, chosen.lora_rank, chosen.lora_alpha, config.seed)
    return LocalLearner(
        model,
        chosen,
        temperature=config.sampling.temperature,
        critic=critic,
        reference=parts.reference,
        updates=parts.updates,
        regime=regime,
        invariant=shares_kernels(config, choose(config)),
        memory_bytes=None if memory is None else memory.learner_room,
        warn=say or warnings.warn,
        companions=PolicyFolder.of(source, renderer.tokenizer, renderer.stop_ids),
        base_model=source.base,
    )


def shares_kernels(config: Config, chosen: Chosen) -> bool:
    """Whether the GPU's sampler and learner take kernels that round alike; there are some for the native models."""
    return chosen.on_gpu and chosen.batch_invariant and implementation_of(config) is ModelImplementation.native


def implementation_of(config: Config) -> ModelImplementation:
    from turnwise.engines.model.loading import choose_implementation

    return choose_implementation(model_source(config), config.model.implementation).implementation

"""The one place that opens engines: the sampler of an evaluation, the learner of a fine-tuning, both of a training."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from turnwise import extensions
from turnwise.config import Config
from turnwise.config.choices import LearnerPlace
from turnwise.engines.devices import choose, learner_place
from turnwise.engines.memory_plan import MemoryPlan, Training, memory_here
from turnwise.engines.opener import (
    LearnerParts,
    OpenLearner,
    OpenPair,
    OpenSampler,
    Say,
    model_source,
    opener_of,
    sharded_learners,
)
from turnwise.engines.publish_weights import check_trainable, needs_files, weights_folder
from turnwise.engines.samplers.sampler import Sampler

if TYPE_CHECKING:
    from turnwise.chat.renderer import Renderer


async def open_sampler(config: Config, renderer: "Renderer", say: Say) -> OpenSampler:
    """The configured sampler, running."""
    return await opener_of(config).open(config, renderer, say)


def open_tuned(
    config: Config, renderer: "Renderer", parts: LearnerParts, memory: MemoryPlan | None, say: Say
) -> OpenLearner:
    """The learner of a fine-tuning: in this process, or in as many as `learner.processes` says. It must be closed."""
    from turnwise.engines.open_in_process import open_learner

    if config.learner.processes == 1:
        return open_learner(config, renderer, parts, memory=memory, say=say)
    return sharded_learners().open_alone(config, renderer, parts, say)


@asynccontextmanager
async def open_pair(config: Config, renderer: "Renderer", parts: LearnerParts, say: Say) -> AsyncIterator[OpenPair]:
    """Sampler and learner on the same weights; the sampler is closed on every path.

    Each has a model of its own, but on a GPU whose sampler rests while the learner learns both compute with the same
    tensors.
    """
    from turnwise.engines.open_in_process import open_apart, open_on_gpu

    async with AsyncExitStack() as stack:

        def keep(sampler: Sampler) -> None:
            stack.push_async_callback(lambda: asyncio.shield(asyncio.ensure_future(sampler.close())))

        memory = None
        if extensions.engine(config.engine.name).here:  # nobody knows what the others leave
            memory = memory_here(config, Training(parts.critic, parts.reference))
        if config.learner.processes > 1:
            beside = sharded_learners().open_beside(config, renderer, parts, say)
            pair = await _open_beside(config, renderer, await stack.enter_async_context(beside), say, keep)
        elif learner_place(config) is LearnerPlace.process:
            from turnwise.engines.open_learner_process import open_with_process

            apart = open_with_process(config, renderer, parts, say, memory, keep)
            pair = await stack.enter_async_context(apart)
        elif (chosen := choose(config)).on_gpu:
            pair = open_on_gpu(config, chosen, renderer, parts, say, memory)
            keep(pair.sampler)
        else:
            pair = await open_apart(config, renderer, parts, say, memory, keep)
        if needs_files(pair.sampler.capabilities, lora=bool(config.learner.lora_rank)):
            size, shared = model_source(config).weight_bytes, opener_of(config).weights_folder(config)
            pair = replace(pair, weights_folder=stack.enter_context(weights_folder(size, shared)))
        yield pair


async def _open_beside(
    config: Config, renderer: "Renderer", learner: OpenLearner, say: Say, keep: Callable[[Sampler], None]
) -> OpenPair:
    """A sampler beside a learner that computes in other processes."""
    import torch

    opened = await open_sampler(config, renderer, say)
    keep(opened.sampler)
    check_trainable(config.engine.name, opened.sampler.capabilities, lora=bool(config.learner.lora_rank))
    torch.set_num_threads(opened.threads)
    return OpenPair(opened.sampler, learner, False, opened.threads, bool(config.engine.sleep))

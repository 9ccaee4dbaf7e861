"""The one place that opens engines: the sampler of an evaluation, the learner of a fine-tuning, both of a training."""

import asyncio
import copy
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from turnwise.chat.renderer import Renderer
from turnwise.choices import EngineName, Precision
from turnwise.config import Config, EngineConfig
from turnwise.config.inputs import FOREIGN
from turnwise.engines.devices import choose
from turnwise.engines.memory_plan import Training, memory_here
from turnwise.engines.opened import (
    LearnerParts,
    OpenEngines,
    OpenSampler,
    Say,
    Together,
    model_source,
    read_policy,
)
from turnwise.engines.opening_cpu import open_cpu
from turnwise.engines.opening_foreign import open_foreign, shared_place
from turnwise.engines.opening_gpu import open_cuda, open_on_gpu
from turnwise.engines.opening_learner import open_learner
from turnwise.engines.opening_own import find_own, open_own
from turnwise.engines.opening_sharded import make_ranks, open_chosen_learner, open_sharded
from turnwise.engines.publishing import check_trainable, needs_files, weights_place
from turnwise.engines.samplers.sampler import Sampler
from turnwise.engines.samplers.scripted import Script, ScriptedSampler, lines
from turnwise.errors import ConfigError, EngineError
from turnwise.knobs import is_plugin

if TYPE_CHECKING:
    from turnwise.engines.learners.sharded import ShardedLearner
    from turnwise.engines.model.policy_model import PolicyModel
    from turnwise.engines.samplers.endpoint import ChatEndpoint

__all__ = [
    "LearnerParts", "OpenEngines", "OpenSampler", "find_own", "model_source", "open_chosen_learner", "open_endpoint",
    "open_engines", "open_learner", "open_sampler", "open_sharded",
]  # fmt: skip

API_KEY_ENV = "OPENAI_API_KEY"
"""The environment variable that holds an endpoint's key."""


async def open_sampler(
    config: Config, renderer: Renderer, say: Say, *, script: Script | None = None, model: "PolicyModel | None" = None
) -> OpenSampler:
    """The configured sampler; a script replaces it. `model` is what it writes with where it runs one here and the
    caller has it already."""
    if script is not None or config.engine.name == EngineName.scripted:
        if renderer.end_id is None:
            raise EngineError("the tokenizer names no end token; the scripted sampler cannot end a turn")
        replies = script or lines(config.engine.script)
        ends = {"end_id": renderer.end_id, "call_end_id": renderer.call_end_id}
        made = ScriptedSampler(renderer.tokenizer, replies, **ends, call_format=renderer.call_format)
        return OpenSampler(made, threads=1)
    if is_plugin(config.engine.name):
        return open_own(config, renderer, say)
    if config.engine.name in FOREIGN:
        return await open_foreign(config, renderer, say)
    chosen = choose(config)
    if chosen.on_gpu:
        return open_cuda(config, chosen, renderer, say, model=model)
    return open_cpu(config, chosen, renderer, say, model=model)


@asynccontextmanager
async def open_engines(config: Config, renderer: Renderer, parts: LearnerParts, say: Say) -> AsyncIterator[OpenEngines]:
    """Sampler and learner on the same weights; the sampler is closed on every path.

    Each has a model of its own, but on a GPU whose sampler rests while the learner learns both compute with the same
    tensors.
    """
    async with AsyncExitStack() as stack:

        def keep(sampler: Sampler) -> None:
            stack.push_async_callback(lambda: asyncio.shield(asyncio.ensure_future(sampler.close())))

        chosen, memory = choose(config), None
        if not is_plugin(config.engine.name) and config.engine.name not in FOREIGN:  # nobody knows what those leave
            memory = memory_here(config, Training(parts.critic, parts.reference))
        together = Together(config, chosen, memory, renderer, parts, say, keep)
        if config.learner.processes > 1:
            ranks = make_ranks(config)
            stack.callback(ranks.stop)
            opened = await _open_beside(
                together, await asyncio.to_thread(open_sharded, config, renderer, parts, ranks, say)
            )
        elif chosen.on_gpu:
            opened = open_on_gpu(together)
        else:
            opened = await _open_apart(together)
        if needs_files(opened.sampler.capabilities, lora=bool(config.learner.lora_rank)):
            bytes_of_all = model_source(config).weight_bytes
            opened = replace(opened, place=stack.enter_context(weights_place(bytes_of_all, shared_place(config))))
        yield opened


async def _open_beside(given: Together, learner: "ShardedLearner") -> OpenEngines:
    """A sampler beside a learner that computes in other processes."""
    import torch

    config = given.config
    opened = await open_sampler(config, given.renderer, given.say)
    given.keep(opened.sampler)
    check_trainable(config.engine.name, opened.sampler.capabilities, lora=bool(config.learner.lora_rank))
    torch.set_num_threads(opened.threads)
    return OpenEngines(opened.sampler, learner, False, opened.threads, bool(config.engine.sleep))


async def _open_apart(given: Together) -> OpenEngines:
    """A sampler on the CPU or of the user's own, and a learner wherever its device is."""
    import torch

    config, chosen, renderer = given.config, given.chosen, given.renderer
    trained = read_policy(config, Precision.float32)
    writer, same = None, False
    if chosen.engine == EngineName.torch:
        same = chosen.precision is Precision.float32
        writer = copy.deepcopy(trained) if same else read_policy(config, chosen.precision)
    opened = await open_sampler(config, renderer, given.say, model=writer)
    given.keep(opened.sampler)
    check_trainable(config.engine.name, opened.sampler.capabilities, lora=bool(config.learner.lora_rank))
    torch.set_num_threads(opened.threads)
    learner = open_learner(
        config, renderer, given.parts, regime=opened.regime, model=trained, memory=given.memory, say=given.say
    )
    same = same and learner.device.type == "cpu" and not learner.forward.narrow
    exact = same and opened.regime is not None
    return OpenEngines(opened.sampler, learner, exact, opened.threads, bool(config.engine.sleep))


def open_endpoint(config: EngineConfig) -> "ChatEndpoint":
    """A client of the configured endpoint; it must be closed."""
    from turnwise.engines.samplers.endpoint import ChatEndpoint

    if config.base_url is None:
        raise ConfigError("engine=openai needs engine.base_url, such as http://127.0.0.1:8000/v1")
    key = os.environ.get(API_KEY_ENV)
    return ChatEndpoint(config.base_url, config.model, key, config.timeout_seconds, config.retries)

"""Opens a sampler in this process and the learner in one of its own, on the same machine: `learner.place=process`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from turnwise import extensions
from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.engines.devices import choose, device_of, published_format
from turnwise.engines.memory_plan import MemoryHolder, MemoryPlan
from turnwise.engines.open_in_process import (
    is_exact,
    is_exact_on_gpu,
    open_cpu,
    open_cuda,
    open_learner,
    say_if_inexact,
)
from turnwise.engines.opener import LearnerParts, OpenPair, Say, dtype_of, opener_of
from turnwise.engines.publish_weights import check_trainable
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.sampler import Sampler

if TYPE_CHECKING:
    from turnwise.engines.learners.hosting import HostedLearner
    from turnwise.engines.model.attention import Regime


@asynccontextmanager
async def open_with_process(
    config: Config,
    renderer: Renderer,
    parts: LearnerParts,
    say: Say,
    memory: MemoryPlan | None,
    keep: Callable[[Sampler], None],
) -> AsyncIterator[OpenPair]:
    """The learner's process ends with the block; `keep` closes the sampler."""
    import torch

    from turnwise.engines.device_clock import DeviceClock
    from turnwise.engines.learners.process import ProcessLearner

    chosen, clock = choose(config), None
    if chosen.on_gpu:
        clock = DeviceClock(torch.device(chosen.device))
        part = _part(memory, MemoryHolder.sampler)
        opened = open_cuda(config, chosen, renderer, say, memory=memory, clock=clock, part=part)
    elif extensions.engine(config.engine.name).here:
        opened = open_cpu(config, chosen, renderer, say)
    else:
        opened = await opener_of(config).open(config, renderer, say)
    keep(opened.sampler)
    check_trainable(config.engine.name, opened.sampler.capabilities, lora=bool(config.learner.lora_rank))
    torch.set_num_threads(opened.threads)
    learner = ProcessLearner(
        partial(open_hosted, config, parts, opened.regime, memory, opened.threads),
        reader=torch.device(chosen.device),
        published=dtype_of(published_format(config)),
        threads=opened.threads,
        hang_seconds=config.learner.hang_seconds,
        say=say,
    )
    try:
        facts = await asyncio.to_thread(learner.open)
        if chosen.on_gpu:
            say_if_inexact(chosen, facts.exact, say)
        say(f"learner: in process {facts.process}, on {facts.device}; weights are handed over on {learner.device}")
        turns = bool(config.engine.sleep)
        yield OpenPair(opened.sampler, learner, facts.exact, opened.threads, turns, clock)
    finally:
        learner.close()


def open_hosted(
    config: Config,
    parts: LearnerParts,
    regime: "Regime | None",
    memory: MemoryPlan | None,
    threads: int,
    say: Say,
) -> "HostedLearner":
    """In the learner's process: what it would be in the run's."""
    import torch

    from turnwise.engines.learners.hosting import HostedLearner
    from turnwise.engines.learners.threads import computing

    device = torch.device(device_of(config.learner.device))
    with computing(threads, device):
        renderer, part = make_renderer(config), _part(memory, MemoryHolder.learner)
        learner = open_learner(config, renderer, parts, regime=regime, memory=memory, part=part, say=say)
    chosen = choose(config)
    if chosen.on_gpu:
        return HostedLearner(learner, is_exact_on_gpu(config, chosen, learner))
    return HostedLearner(learner, is_exact(config, chosen, learner, regime))


def _part(memory: MemoryPlan | None, part: MemoryHolder) -> MemoryHolder:
    """Of a plan for two processes each has its part; another plan is that of one."""
    return part if memory is not None and memory.apart else MemoryHolder.both

"""Sampler and learner take turns with memory: asleep from the first look at a step until new weights are published."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from turnwise import configure
from turnwise.data.loader import Loader
from turnwise.engines.device_clock import DeviceClock
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.open_in_process import open_learner
from turnwise.engines.opener import LearnerParts, model_source
from turnwise.engines.samplers.cpu.threads import UNPADDED
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.gpu.cuda import CudaSampler
from turnwise.engines.samplers.in_process import InProcessSampler
from turnwise.rollout.collector import Collected, Groups
from turnwise.rollout.prepare import Prepared, prepare
from turnwise.training import kl
from turnwise.training.run_engines import ClockedLearner, Engines, memory_held
from turnwise.training.sequences import to_sequences

CPU = torch.device("cpu")
SMALL = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=2", "training.group_size=3",
    "sampling.max_tokens=24", "engine.threads=1",
)  # fmt: skip


def torch_sampler(model: Decoder, prepared: Prepared, clock: DeviceClock) -> InProcessSampler:
    assert prepared.renderer is not None
    decode = prepared.renderer.tokenizer.decode
    return TorchSampler(model, decode=decode, max_batch=8, threads=1, regime=UNPADDED)


def cuda_sampler(model: Decoder, prepared: Prepared, clock: DeviceClock) -> InProcessSampler:
    """As on a GPU, with the kernels' references."""
    assert prepared.renderer is not None
    return CudaSampler(
        model, device=CPU, decode=prepared.renderer.tokenizer.decode, max_batch=8, cache_bytes=1 << 22,
        invariant=False, clock=clock, say=print,
    )  # fmt: skip


class Watched(LocalLearner):
    """Says at each piece of work whether the sampler slept and what it held."""

    sampler: InProcessSampler
    seen: list[tuple[bool, int]]
    awaited: int = -1
    """Tokens that the sampler must have written before an update goes on."""

    def score(self, *arguments: Any) -> Any:
        self.seen.append((self.sampler._batcher.asleep, self.sampler._batcher.bytes))
        return super().score(*arguments)

    def update(self, *arguments: Any) -> Any:
        self.seen.append((self.sampler._batcher.asleep, self.sampler._batcher.bytes))
        end = time.monotonic() + 60
        while self.sampler.stats.decoded_tokens <= self.awaited:
            assert time.monotonic() < end, "nothing is written while the learner learns"
            time.sleep(0.001)
        return super().update(*arguments)


@pytest.mark.parametrize("make", [torch_sampler, cuda_sampler])
@pytest.mark.parametrize("take_turns", [True, False])
def test_the_sampler_sleeps_while_the_learner_learns(
    make: Callable[[Decoder, Prepared, DeviceClock], InProcessSampler], take_turns: bool
) -> None:
    config, before = configure(*SMALL), torch.get_num_threads()
    prepared = prepare(config, "train", limit=2)
    assert prepared.renderer is not None
    learner, clock = open_learner(config, prepared.renderer, LearnerParts(1)), DeviceClock(CPU)
    learner.__class__ = Watched
    assert isinstance(learner, Watched)

    async def body() -> dict[str, float]:
        sampler = make(Decoder.read(model_source(config).folder), prepared, clock)
        learner.sampler, learner.seen = sampler, []
        engines = Engines(
            ClockedLearner(learner, clock), kl.controller(0.0, None), sampler, False, 1, take_turns, clock
        )
        try:
            await engines.publish(0)
            collected = await one_step(engines, prepared)
            assert sampler.stats.decoded_tokens > 0
            sequences = to_sequences(collected.groups)
            for sequence in sequences:  # groups that are all wrong teach nothing
                sequence.reward = float(sequence.trajectory % 2)
            assert "log-probs differ by" in await engines.compare(sequences, config)
            update = engines.update(sequences, config, 0, collected.baselines)
            if take_turns:
                await update
            else:  # as with training.max_lag=1: the learner's thread waits for what is written meanwhile
                learner.awaited = sampler.stats.decoded_tokens
                await asyncio.gather(update, one_step(engines, prepared))
            assert sampler._batcher.asleep == take_turns
            await engines.publish(1)
            assert not sampler._batcher.asleep and sampler.policy_version == 1
            await one_step(engines, prepared)
            return engines.device_metrics()
        finally:
            await sampler.close()

    try:
        metrics = asyncio.run(body())
    finally:
        torch.set_num_threads(before)
    assert learner.step > 0 and len(learner.seen) >= 2
    assert {asleep for asleep, _ in learner.seen} == {take_turns}
    assert not take_turns or {held for _, held in learner.seen} == {0}
    assert metrics.keys() == {"gpu/idle_share"} and 0.0 <= metrics["gpu/idle_share"] < 1.0


def test_memory_held_is_what_the_card_has_lost() -> None:
    """What was reserved at the peak, used or not, and all that PyTorch has no part in."""
    gib = 2**30
    total, reserved, outside = 140 * gib, 130 * gib, 2 * gib
    assert memory_held(134 * gib, reserved, total - reserved - outside, total) == 136 * gib
    assert memory_held(gib, 3 * gib, total, total) == gib  # counters of two moments


async def one_step(engines: Engines, prepared: Prepared) -> Collected:
    loader = Loader(prepared.samples, 2, 0, shuffle=False)
    groups = Groups(engines, replace(prepared), loader, 0)
    async with groups.collector:
        return await groups.next_step(0)

"""What a training run does with its engines: publish, update, and the state that a checkpoint keeps of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from turnwise.assemble import Prepared, token_context
from turnwise.checks.training import check_training, total_updates
from turnwise.cluster import engines as cluster
from turnwise.cluster.connection import on_ray
from turnwise.config import Config, SamplingConfig
from turnwise.data.loader import LoaderState
from turnwise.engines import opening, publishing
from turnwise.engines.device_clock import DeviceClock
from turnwise.engines.learners.clocked import ClockedLearner
from turnwise.engines.learners.learner import Learner
from turnwise.engines.opening import LearnerParts
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.sampler import Sampler
from turnwise.rollout.episode import RolloutContext
from turnwise.storage.checkpoints import Checkpoint
from turnwise.trainer.state import FORMAT, KLState, LoaderPosition, Progress, RunState, write_json
from turnwise.training import kl
from turnwise.training.optimise import check_logprob_gap, needs_critic, needs_reference, optimise
from turnwise.training.sequences import TrainSequence

P = ParamSpec("P")
T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(slots=True)
class Engines:
    """Everything with weights in it."""

    learner: Learner
    kl_controller: kl.KLController
    sampler: Sampler
    invariant: bool
    """Whether the sampler's arithmetic is proven not to depend on batching: its log-probs can be compared exactly."""
    threads: int
    take_turns: bool = False
    """The sampler gives its memory back while the learner learns: from the first look at a step to `publish`."""
    clock: DeviceClock | None = None
    device: torch.device = CPU
    """Where the learner computes."""
    metrics: Callable[[], dict[str, float]] | None = None
    """Of engines that run elsewhere."""
    place: Path | None = None
    """Where files of weights are put for the sampler, where it takes files."""
    version: int = 0
    """Of the weights that were published last."""

    def context(self, prepared: Prepared, sampling: SamplingConfig) -> RolloutContext:
        """A context for these samples, drawn this way."""
        return token_context(prepared, prepared.renderer or make_renderer(prepared.config), self.sampler, sampling)

    async def compare(self, sequences: Sequence[TrainSequence], config: Config) -> str:
        """Before the first update, sampler and learner must agree about the same tokens; how far they do."""
        return await self._compute(check_logprob_gap, self.learner, sequences, config, exact=self.invariant)

    async def update(
        self, sequences: Sequence[TrainSequence], config: Config, step: int, baselines: dict[int, float | None]
    ) -> dict[str, float]:
        """One optimisation step on these sequences; returns its metrics. Collection goes on meanwhile if it may."""
        controller = self.kl_controller
        return await self._compute(
            optimise, self.learner, sequences, config, step, kl_controller=controller, baselines=baselines
        )

    async def _compute(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self.take_turns:
            await self.sampler.sleep()
        return await asyncio.to_thread(self.in_threads(work), *args, **kwargs)

    def in_threads(self, work: Callable[P, T]) -> Callable[P, T]:
        """The work with the engines' number of threads and GPU, which belong to the thread that computes."""

        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            torch.set_num_threads(self.threads)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            return work(*args, **kwargs)

        return wrapped

    async def publish(self, version: int) -> None:
        """Let the sampler write with the learner's present weights."""
        await publishing.publish(self.learner, self.sampler, version, self.place)
        self.version = version
        if self.take_turns:
            await self.sampler.wake()

    def device_metrics(self) -> dict[str, float]:
        """Of the GPU since this was last asked: the share of the time it had nothing to do, and the most it held; of a
        cluster what runs there and what was lost."""
        elsewhere = {} if self.metrics is None else self.metrics()
        if self.clock is None:
            return elsewhere
        idle = self.clock.take()
        found = elsewhere | ({} if idle is None else {"gpu/idle_share": idle})
        if self.clock.device.type == "cuda":
            device = self.clock.device
            free, total = torch.cuda.mem_get_info(device)
            peak, reserved = torch.cuda.max_memory_reserved(device), torch.cuda.memory_reserved(device)
            found["gpu/memory_gib"] = memory_held(peak, reserved, free, total) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
        return found

    def save(self, folder: Path, progress: Progress, loader: LoaderState) -> None:
        """Write a checkpoint: a Hugging Face folder `policy`, peft's `policy_adapter` with LoRA, and the state."""
        self.learner.save_policy(folder)
        self.learner.save(folder)
        state = RunState(
            format=FORMAT,
            kl=KLState.model_validate(self.kl_controller.state()),
            progress=progress,
            loader=LoaderPosition(**asdict(loader)),
        )
        write_json(folder, state)

    def load(self, checkpoint: Checkpoint[RunState]) -> None:
        """Go on from a checkpoint."""
        self.learner.load(checkpoint.folder)
        self.kl_controller.load(checkpoint.state.kl.model_dump())


def memory_held(peak: int, reserved: int, free: int, total: int) -> int:
    """The most that a GPU held, in bytes: what PyTorch had reserved at its peak, used or not, and what lies outside of
    that now: the context of CUDA, its libraries, and other programs."""
    return peak + max(0, total - free - reserved)


@asynccontextmanager
async def open_engines(config: Config, prepared: Prepared, say: Callable[[str], None]) -> AsyncIterator[Engines]:
    """Sampler and learner on the same weights; critic and reference only when the algorithm needs them."""
    check_training(config)
    renderer = prepared.renderer or make_renderer(config)
    parts = LearnerParts(total_updates(config), critic=needs_critic(config), reference=needs_reference(config))
    controller = kl.controller(config.algorithm.kl_reward, config.algorithm.kl_target)
    if on_ray(config):
        opening_them = cluster.open_engines(config, parts, say)
    else:
        opening_them = opening.open_engines(config, renderer, parts, say)
    async with opening_them as opened:
        learner: Learner = opened.learner
        if opened.clock is not None and opened.learner.device == opened.clock.device:
            learner = ClockedLearner(learner, opened.clock)
        yield Engines(
            learner,
            controller,
            opened.sampler,
            opened.exact,
            opened.threads,
            opened.take_turns,
            opened.clock,
            opened.learner.device,
            opened.metrics,
            opened.place,
        )

"""What a training run does with its engines: publish, update, mark their time, and the state a checkpoint keeps."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from turnwise.config import Config, SamplingConfig
from turnwise.engines import publish_weights
from turnwise.engines.device_clock import DeviceClock
from turnwise.engines.learners.learner import Floats, Learner, Objective, TokenBatch, UpdateResult, Who
from turnwise.engines.learners.threads import computing
from turnwise.engines.opener import LearnerParts
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.sampler import Sampler
from turnwise.engines.weight_updates import FullWeights, StoredWeights
from turnwise.rollout.episode import RolloutContext
from turnwise.rollout.placement import placement_of
from turnwise.rollout.prepare import Prepared, token_context
from turnwise.rollout.workers.players import open_workers, played_by
from turnwise.storage.checkpoints import Checkpoint
from turnwise.training import kl
from turnwise.training.optimise import check_logprob_gap, needs_critic, needs_reference, optimise
from turnwise.training.runs.state import FORMAT, KLState, Progress, RunState, write_json
from turnwise.training.sequences import TrainSequence

if TYPE_CHECKING:
    from turnwise.data.loader import LoaderState
    from turnwise.rollout.workers.pool import WorkerPool

Work = TypeVar("Work", bound=Callable[..., Any])
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
    weights_folder: Path | None = None
    """Where files of weights are put for the sampler, where it takes files."""
    workers: "WorkerPool | None" = None
    """Who plays the episodes, where other processes do."""
    version: int = 0
    """Of the weights that were published last."""

    def context(self, prepared: Prepared, sampling: SamplingConfig) -> RolloutContext:
        """A context for these samples, drawn this way."""
        renderer = prepared.renderer or make_renderer(prepared.config)
        return played_by(self.workers, token_context(prepared, renderer, self.sampler, sampling), prepared)

    async def compare(self, sequences: Sequence[TrainSequence], config: Config) -> str:
        """Before the first update, sampler and learner must agree about the same tokens; how far they do."""
        await self._rest()
        check = self.in_threads(check_logprob_gap)
        return await asyncio.to_thread(check, self.learner, sequences, config, exact=self.invariant)

    async def update(
        self, sequences: Sequence[TrainSequence], config: Config, step: int, baselines: dict[int, float | None]
    ) -> dict[str, float]:
        """One optimisation step on these sequences; returns its metrics. Collection goes on meanwhile if it may."""
        await self._rest()
        work, controller = self.in_threads(optimise), self.kl_controller
        return await asyncio.to_thread(
            work, self.learner, sequences, config, step, kl_controller=controller, baselines=baselines
        )

    async def _rest(self) -> None:
        """Have the sampler give its memory back, where the two take turns."""
        if self.take_turns:
            await self.sampler.sleep()

    def in_threads(self, work: Work) -> Work:
        """The work with the engines' number of threads and GPU, which belong to the thread that computes."""
        return computing(self.threads, self.device)(work)

    async def publish(self, version: int) -> None:
        """Let the sampler write with the learner's present weights."""
        await publish_weights.publish(self.learner, self.sampler, version, self.weights_folder)
        self.version = version
        if self.take_turns:
            await self.sampler.wake()

    def device_metrics(self) -> dict[str, float]:
        """Of the GPU since this was last asked: the share of the time it had nothing to do, and the most it held; of a
        cluster what runs there and what was lost."""
        elsewhere = {} if self.metrics is None else self.metrics()
        if self.workers is not None:
            elsewhere["rollout/workers"] = float(self.workers.playing)
            elsewhere["rollout/workers_lost"] = float(self.workers.take_lost())
        if self.clock is None:
            return elsewhere
        idle = self.clock.take()
        metrics = elsewhere | ({} if idle is None else {"gpu/idle_share": idle})
        if self.clock.device.type == "cuda":
            device = self.clock.device
            free, total = torch.cuda.mem_get_info(device)
            peak, reserved = torch.cuda.max_memory_reserved(device), torch.cuda.memory_reserved(device)
            metrics["gpu/memory_gib"] = memory_held(peak, reserved, free, total) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
        return metrics

    def save(self, folder: Path, progress: Progress, loader: "LoaderState", *, whole: bool = True) -> None:
        """Write a checkpoint: a Hugging Face folder `policy`, peft's `policy_adapter` with LoRA, and the state; unless
        it is `whole`, without the learner's."""
        self.learner.save_policy(folder)
        if whole:
            self.learner.save(folder)
        state = RunState(
            format=FORMAT,
            kl=KLState.model_validate(self.kl_controller.state()),
            progress=progress,
            loader=loader,
        )
        write_json(folder, state)

    def load(self, checkpoint: Checkpoint[RunState]) -> None:
        """Restores the learner and the KL controller from a checkpoint."""
        self.learner.load(checkpoint.folder)
        self.kl_controller.load(checkpoint.state.kl.model_dump())


def memory_held(peak: int, reserved: int, free: int, total: int) -> int:
    """The most that a GPU held, in bytes: what PyTorch had reserved at its peak, used or not, and what lies outside of
    that now: the context of CUDA, its libraries, and other programs."""
    return peak + max(0, total - free - reserved)


@asynccontextmanager
async def open_engines(
    config: Config, prepared: Prepared, say: Callable[[str], None], heldout: Prepared | None = None
) -> AsyncIterator[Engines]:
    """Sampler and learner on the same weights, and who plays episodes of both splits beside this process; critic and
    reference only when the algorithm needs them."""
    from turnwise.training.checks import check_training, total_updates

    check_training(config)
    renderer = prepared.renderer or make_renderer(config)
    parts = LearnerParts(total_updates(config), critic=needs_critic(config), reference=needs_reference(config))
    controller = kl.controller(config.algorithm.kl_reward, config.algorithm.kl_target)
    splits = [prepared] if heldout is None else [prepared, heldout]
    async with (
        placement_of(config).open_pair(renderer, parts, say) as opened,
        open_workers(config, splits, opened.sampler, say) as workers,
    ):
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
            opened.weights_folder,
            workers,
        )


class ClockedLearner:
    """Implements `Learner` by another one; what it does between two calls, such as packing, is not marked."""

    def __init__(self, learner: Learner, clock: DeviceClock) -> None:
        self._learner, self._clock = learner, clock

    @property
    def step(self) -> int:
        """How many times the weights have changed."""
        return self._learner.step

    @property
    def token_budget(self) -> int:
        """Tokens of one pass that it has room for."""
        return self._learner.token_budget

    def score(self, batch: TokenBatch, who: Who) -> Floats:
        """One number for every policy token."""
        with self._marked():
            return self._learner.score(batch, who)

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> UpdateResult:
        """One optimizer step, counted as time in which the device is busy."""
        with self._marked():
            return self._learner.update(batches, objective)

    def weights(self) -> FullWeights | StoredWeights:
        """The policy's weights as the wrapped learner gives them."""
        return self._learner.weights()

    def save(self, folder: Path) -> None:
        """Writes into `folder` all that the wrapped learner needs to go on."""
        self._learner.save(folder)

    @property
    def saving(self) -> bool:
        """Whether that is still being written."""
        return self._learner.saving

    def saved(self) -> None:
        """Waits until the last state that was to be saved is on disk."""
        self._learner.saved()

    def load(self, folder: Path) -> None:
        """Makes the wrapped learner go on from a saved state."""
        self._learner.load(folder)

    def save_policy(self, folder: Path) -> None:
        """The policy as others load it."""
        self._learner.save_policy(folder)

    def save_adapter(self, folder: Path) -> bool:
        """Writes the adapter alone, without the base model; False where the learner has none."""
        return self._learner.save_adapter(folder)

    def close(self) -> None:
        """Ends the processes that the wrapped learner runs elsewhere."""
        self._learner.close()

    @contextmanager
    def _marked(self) -> Iterator[None]:
        span = self._clock.begin()
        try:
            yield
        finally:
            self._clock.end(span)

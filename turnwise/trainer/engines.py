"""The engines of a training run: sampler, learner, critic and reference, opened together and kept in step."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from turnwise.assemble import Prepared, make_renderer, model_source, token_context
from turnwise.checks.training import check_device, check_training, total_updates
from turnwise.config import Config, SamplingConfig
from turnwise.data.loader import LoaderState
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.learner import Learner
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.model.attention import Regime
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.loading import choose_implementation, read_model
from turnwise.engines.model.lora import LoraDecoder
from turnwise.engines.model.policy_folder import PolicyFolder
from turnwise.engines.samplers.threads import choose_threads
from turnwise.engines.samplers.torch_cpu import TorchSampler
from turnwise.rollout.episode import RolloutContext
from turnwise.storage.checkpoints import Checkpoint
from turnwise.trainer.state import FORMAT, KLState, LoaderPosition, Progress, RunState, write_json
from turnwise.training import kl
from turnwise.training.optimise import needs_critic, needs_reference, optimise
from turnwise.training.sequences import TrainSequence

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Engines:
    """Everything with weights in it."""

    learner: Learner
    kl_controller: kl.KLController
    sampler: TorchSampler
    invariant: bool
    """Whether the sampler's arithmetic is proven not to depend on batching: its log-probs can be compared exactly."""
    threads: int

    def context(self, prepared: Prepared, sampling: SamplingConfig) -> RolloutContext:
        """A context for these samples, drawn this way."""
        return token_context(prepared, prepared.renderer or make_renderer(prepared.config), self.sampler, sampling)

    def in_threads(self, work: Callable[P, T]) -> Callable[P, T]:
        """The work with the engines' number of threads, which belongs to the thread that computes."""

        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            torch.set_num_threads(self.threads)
            return work(*args, **kwargs)

        return wrapped

    def update(
        self, sequences: Sequence[TrainSequence], config: Config, step: int, baselines: dict[int, float | None]
    ) -> dict[str, float]:
        """One optimisation step on these sequences; returns its metrics."""
        return optimise(self.learner, sequences, config, step, kl_controller=self.kl_controller, baselines=baselines)

    async def publish(self, version: int) -> None:
        """Let the sampler write with the learner's present weights."""
        await self.sampler.publish(self.learner.weights(), version)

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


@asynccontextmanager
async def open_engines(config: Config, prepared: Prepared, say: Callable[[str], None]) -> AsyncIterator[Engines]:
    """Sampler and learner on the same weights; critic and reference only when the algorithm needs them."""
    check_training(config)
    source = model_source(config)
    base = read_model(source, choose_implementation(source, config.model.implementation), torch.float32)
    written_in: torch.dtype = getattr(torch, config.model.precision.value)
    writer = Decoder(base.config, {name: tensor.to(written_in, copy=True) for name, tensor in base.tensors().items()})
    choice = choose_threads(writer, config.engine.threads)
    torch.set_num_threads(choice.threads)
    say(f"torch engine and learner: {choice.threads} thread(s); {choice.promise()}")
    algorithm = config.algorithm
    controller = kl.controller(algorithm.kl_reward, algorithm.kl_target)
    renderer = prepared.renderer or make_renderer(config)
    policy = PolicyFolder.of(source, renderer.tokenizer, renderer.stop_ids)
    learner = make_learner(config, base, choice.proven, policy, source.base)
    sampler = TorchSampler(
        writer,
        decode=renderer.tokenizer.decode,
        max_batch=config.engine.max_batch,
        threads=choice.threads,
        regime=choice.regime,
    )
    try:
        same = learner.device.type == "cpu" and not learner.forward.narrow and writer.dtype == base.dtype
        exact = choice.invariant and same
        yield Engines(learner, controller, sampler, exact, choice.threads)
    finally:
        await sampler.close()


def make_learner(
    config: Config,
    base: Decoder,
    regime: Regime | None,
    companions: PolicyFolder | None = None,
    base_model: str = "",
) -> LocalLearner:
    """The learner of a config: all weights or LoRA, with a critic and a reference when the algorithm needs them.

    `regime` is the sampler's, where it is proven; an adapter is put on `base_model`, the folder the run started from or
    its name on the hub.
    """
    chosen, decoder = config.learner, base
    check_device(chosen.device)
    critic = None
    if needs_critic(config):  # before LoRA is added: all weights of a critic's own trunk are trained
        critic = Critic.sharing(base) if chosen.shared_critic else Critic.copying(base)
    if chosen.lora_rank:
        decoder = LoraDecoder(base, rank=chosen.lora_rank, alpha=chosen.lora_alpha, seed=config.seed)
    return LocalLearner(
        decoder,
        chosen,
        temperature=config.sampling.temperature,
        critic=critic,
        reference=needs_reference(config),
        updates=total_updates(config),
        regime=regime,
        companions=companions,
        base_model=base_model,
    )

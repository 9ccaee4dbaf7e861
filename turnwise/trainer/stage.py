"""The stage with a learner on it: sampler, learner, critic and reference, opened together and kept in step."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from turnwise.assemble import Prepared, make_renderer, model_folder, token_stage
from turnwise.checks.training import check_device, check_training
from turnwise.config import Config, SamplingConfig
from turnwise.engines.critic import Critic
from turnwise.engines.decoder import Decoder
from turnwise.engines.learner import LearnerSettings, TorchLearner
from turnwise.engines.lora import LoraDecoder, LoraSettings
from turnwise.engines.optimizer import OptimizerSettings
from turnwise.engines.threads import choose_threads
from turnwise.engines.torch_sampler import TorchSampler
from turnwise.files import replacing
from turnwise.rollout.episode import Stage
from turnwise.training import kl
from turnwise.training.optimise import Mind, needs_critic, needs_reference

STATE, TENSORS = "state.json", "learner.safetensors"


@dataclass(slots=True)
class TrainingStage:
    """Everything with weights in it."""

    mind: Mind
    sampler: TorchSampler
    invariant: bool
    """Whether the sampler's arithmetic was proven to be independent of batching, so that parity can be exact."""
    threads: int
    source: Path

    def stage(self, prepared: Prepared, sampling: SamplingConfig) -> Stage:
        """A stage for these samples, drawn this way."""
        return token_stage(prepared, prepared.renderer or make_renderer(prepared.config), self.sampler, sampling)

    async def publish(self, version: int) -> None:
        """Let the sampler write with the learner's present weights."""
        await self.sampler.publish(self.mind.learner.published(), version)

    def save(self, folder: Path, progress: dict[str, Any]) -> None:
        """Write a checkpoint: a Hugging Face folder `policy`, and all that is needed to go on."""
        learner = self.mind.learner
        learner.save_policy(folder / "policy")
        for path in self.source.iterdir():
            if path.name.startswith(("tokenizer", "chat_template", "special_tokens", "vocab", "merges")):
                (folder / "policy" / path.name).write_bytes(path.read_bytes())
        tensors, info = learner.state()
        with replacing(folder / TENSORS) as file:
            file.write(save({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}))
        state = {"learner": info, "kl": self.mind.controller.state(), "progress": progress}
        with replacing(folder / STATE) as file:
            file.write(json.dumps(state, indent=2).encode())

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on from a checkpoint; returns its progress."""
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self.mind.learner.load_state(load_file(folder / TENSORS), state["learner"])
        self.mind.controller.load(state["kl"])
        progress: dict[str, Any] = state["progress"]
        return progress


@asynccontextmanager
async def open_training(config: Config, prepared: Prepared, say: Callable[[str], None]) -> AsyncIterator[TrainingStage]:
    """Sampler and learner on the same weights; critic and reference only when the algorithm needs them."""
    check_training(config)
    source = model_folder(config.model.path)
    base = Decoder.load(source, torch.float32)
    choice = choose_threads(base, config.engine.threads)
    torch.set_num_threads(choice.threads)
    parity = "exact" if choice.invariant else "close"
    say(f"torch engine and learner: {choice.threads} thread(s), parity can be {parity}")
    learner = make_learner(config, base)
    reference = learner.reference() if needs_reference(config) else None
    algorithm = config.algorithm
    controller = kl.controller(
        algorithm.kl_control, algorithm.kl_reward, target=algorithm.kl_target, horizon=algorithm.kl_horizon
    )
    renderer = prepared.renderer or make_renderer(config)
    sampler = TorchSampler(
        Decoder(base.config, {name: tensor.detach().cpu().clone() for name, tensor in learner.published().items()}),
        decode=renderer.tokenizer.decode,
        max_batch=config.engine.max_batch,
        threads=choice.threads,
    )
    try:
        exact = choice.invariant and learner.device.type == "cpu" and not learner.forward.narrow
        yield TrainingStage(Mind(learner, reference, controller), sampler, exact, choice.threads, source)
    finally:
        await sampler.close()


def make_learner(config: Config, base: Decoder) -> TorchLearner:
    """The learner of a config: all weights or LoRA, with a critic when the advantage needs one."""
    chosen = config.learner
    updates = config.training.steps * config.training.epochs * config.training.minibatches
    policy = OptimizerSettings(
        lr=chosen.lr,
        weight_decay=chosen.weight_decay,
        max_grad_norm=chosen.grad_clip,
        warmup_steps=chosen.warmup,
        decay=chosen.decay,
        total_steps=updates,
    )
    decoder = base
    if chosen.lora_rank:
        decoder = LoraDecoder(base, LoraSettings(rank=chosen.lora_rank, alpha=chosen.lora_alpha), config.seed)
    critic, critic_settings = None, None
    if needs_critic(config):
        critic = Critic.sharing(decoder) if chosen.shared_critic else Critic.copying(decoder)
        critic_settings = replace(policy, lr=chosen.critic_lr)
    check_device(chosen.device)
    settings = LearnerSettings(
        policy,
        critic_settings,
        device=chosen.device,
        precision=chosen.precision,
        recompute_layers=chosen.gradient_checkpointing,
    )
    return TorchLearner(decoder, settings, temperature=config.sampling.temperature, critic=critic)

"""A small learner and a small host of calls: another process finds them by this file's name."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from turnwise.config import LearnerConfig
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.hosting import HostedLearner
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.process import ProcessLearner
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.lora import LoraDecoder
from turnwise.engines.samplers.cpu.threads import REGIMES


def make(lora: bool) -> LocalLearner:
    """All weights and a critic, or LoRA without."""
    policy: Decoder = Decoder.fresh(DecoderConfig("qwen3", 96, 64, 128, 2, 4, 2, 16, 512), 7)
    critic = None if lora else Critic.copying(policy)
    if lora:
        policy = LoraDecoder(policy, rank=4, alpha=16.0, seed=2)
    config = LearnerConfig(lr=1e-2, critic_lr=1e-2)
    return LocalLearner(
        policy, config, temperature=0.9, critic=critic, reference=True, regime=REGIMES[0], base_model="base"
    )


def make_hosted(lora: bool, say: Callable[[str], None]) -> HostedLearner:
    """The same in the process that asks for it."""
    torch.set_num_threads(1)
    say(f"lora={lora}")
    return HostedLearner(make(lora), exact=True)


def started(lora: bool, notes: list[str], **options: Any) -> ProcessLearner:
    """One in a process of its own, to be closed."""
    options = {"reader": torch.device("cpu")} | options
    learner = ProcessLearner(partial(make_hosted, lora), say=notes.append, **options)
    facts = learner.open()
    assert facts.exact and facts.device == str(options["reader"]) and facts.process != os.getpid()
    return learner


class Echo:
    """A host that needs nothing but the interpreter."""

    def __init__(self, number: int) -> None:
        self._number = number

    def say(self, given: Any) -> Any:
        """What was given, and which host this is."""
        return self._number, given

    def fail(self, error: Exception) -> None:
        """Raise it."""
        raise error

    def rest(self) -> None:
        """Come no further."""
        time.sleep(3600)

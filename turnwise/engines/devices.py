"""The one place that says what `auto` and null mean here: which engine, device, precision and batch, and why."""

import re
from dataclasses import dataclass, replace

from turnwise.choices import EngineName, Precision
from turnwise.config import Config, LearnerConfig
from turnwise.errors import ConfigError

CPU_BATCH, GPU_BATCH = 64, 1024
"""Sequences decoded together."""
EPISODES = 256
"""Under way at once, where no GPU waits for them."""
TOKEN_BUDGET = 8192
"""Tokens of one forward pass of the learner, where memory does not decide."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """`Gpu("NVIDIA H200", 150_000_000_000)`."""

    name: str
    memory: int
    """Bytes."""

    def __str__(self) -> str:
        return f"{self.name}, {self.memory / 2**30:.0f} GiB"


@dataclass(frozen=True, slots=True)
class Seen:
    """What PyTorch sees of this machine."""

    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the sampler's knobs mean on this machine; the same config may mean more where there is a GPU."""

    engine: str
    """Never `auto`."""
    why: str
    """Why this engine, where the config leaves it open; else empty."""
    device: str
    """Where the sampler computes: cpu or cuda:N."""
    precision: Precision
    batch_invariant: bool
    max_batch: int
    episodes: int
    """Under way at once."""

    @property
    def on_gpu(self) -> bool:
        """Whether the sampler is on a GPU."""
        return self.device != "cpu"

    def __str__(self) -> str:
        return f"{self.engine} (auto: {self.why})" if self.why else self.engine


def look() -> Seen:
    """What PyTorch sees now."""
    import torch

    if not torch.cuda.is_available():
        return Seen()
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return Seen(tuple(Gpu(one.name, one.total_memory) for one in found))


def choose(config: Config, seen: Seen | None = None) -> Chosen:
    """What a config means on a machine that has this; engine=cuda without a GPU is a ConfigError."""
    engine = config.engine
    name, why = engine.name, ""
    if name in (EngineName.auto, EngineName.cuda):  # PyTorch takes its time to load, and nobody else has to know
        seen = look() if seen is None else seen
        if name == EngineName.auto:
            name = EngineName.cuda.value if seen.gpus else EngineName.torch.value
            why = f"PyTorch sees {seen.gpus[0]}" if seen.gpus else "PyTorch sees no GPU"
        elif not seen.gpus:
            raise ConfigError("engine=cuda: PyTorch sees no GPU on this machine; engine=torch writes on the CPU")
    device, most = "cpu", engine.max_batch or CPU_BATCH
    if name == EngineName.cuda:  # beside the learner: what is published is copied on the GPU, or not at all
        device = device_of(config.learner.device if config.learner.device.startswith("cuda") else "cuda", seen)
        most = engine.max_batch or GPU_BATCH
    on_gpu = device != "cpu"
    return Chosen(
        engine=name,
        why=why,
        device=device,
        precision=config.model.precision or _narrow_on(device),
        batch_invariant=not on_gpu if engine.batch_invariant is None else engine.batch_invariant,
        max_batch=most,
        episodes=config.rollout.concurrency or (2 * most if on_gpu else EPISODES),
    )


def device_of(wanted: str, seen: Seen | None = None) -> str:
    """`learner.device` as cpu or cuda:N; one that is not there is a ConfigError."""
    if wanted == "cpu":
        return wanted
    if not re.fullmatch(r"auto|cuda(:\d{1,3})?", wanted):
        raise ConfigError(f"learner.device={wanted}: auto, cpu or cuda, or one GPU such as cuda:0")
    seen = look() if seen is None else seen
    if wanted == "auto" and not seen.gpus:
        return "cpu"
    if not seen.gpus:
        raise ConfigError(f"learner.device={wanted}: PyTorch finds no CUDA device on this machine")
    number = int(wanted.partition(":")[2] or 0)
    if number >= len(seen.gpus):
        raise ConfigError(f"learner.device={wanted}: this machine has {len(seen.gpus)} CUDA device(s)")
    return f"cuda:{number}"


def learner_here(config: LearnerConfig, seen: Seen | None = None) -> LearnerConfig:
    """The learner's knobs with nothing left open but what the memory plan decides."""
    device = device_of(config.device, seen)
    return replace(config, device=device, precision=config.precision or _narrow_on(device))


def _narrow_on(device: str) -> Precision:
    return Precision.float32 if device == "cpu" else Precision.bfloat16

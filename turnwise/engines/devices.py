"""The one place that says what `auto` and null mean here: which engine, device, precision and batch, and why."""

import math
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec

from turnwise.choices import ClusterName, EngineName, OptimizerName, Precision
from turnwise.config import Config, LearnerConfig
from turnwise.config.inputs import FOREIGN
from turnwise.errors import ConfigError

CPU_BATCH, GPU_BATCH = 64, 1024
"""Sequences decoded together."""
EPISODES = 256
"""Under way at once, where no GPU waits for them."""
SERVER_BATCH, LARGE_SERVER_BATCH, LARGE_GPU = 256, 1024, 70 * 2**30
"""Sequences that vLLM decodes together where nobody says how many: on any GPU, and on one with so many bytes."""
LEAST_CAPABILITY = 8
"""Of a GPU: the first number of its compute capability."""
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
    unfit: str = ""
    """Why they cannot be used, although they are there."""

    @property
    def none(self) -> str:
        """Why there is no GPU to use."""
        return f"PyTorch sees {self.gpus[0]}, but {self.unfit}" if self.unfit else "PyTorch sees no GPU"

    @property
    def usable(self) -> bool:
        """Whether there is a GPU to use."""
        return bool(self.gpus) and not self.unfit


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
    unfit = ""
    if find_spec("triton") is None:
        unfit = "Triton, in which its kernels are written, is not installed"
    elif min(one.major for one in found) < LEAST_CAPABILITY:
        unfit = f"Triton and bfloat16 need compute capability {LEAST_CAPABILITY}.0"
    return Seen(tuple(Gpu(one.name, one.total_memory) for one in found), unfit)


def seen_by_sampler(config: Config) -> Seen:
    """What there is where the sampler runs: here, or on the nodes of a cluster what it reserves there."""
    return _seen_with(config, config.cluster.sampler_gpus)


def seen_by_learner(config: Config) -> Seen:
    """The same of the learner."""
    return _seen_with(config, config.cluster.learner_gpus)


def _seen_with(config: Config, reserved: float) -> Seen:
    if config.cluster.name is ClusterName.none:
        return look()
    return Seen((Gpu("a GPU of the cluster", 0),) * math.ceil(reserved))


def choose(config: Config, seen: Seen | None = None) -> Chosen:
    """What a config means on a machine that has this; engine=cuda without a GPU is a ConfigError."""
    engine = config.engine
    name, why = engine.name, ""
    if name in (EngineName.auto, EngineName.cuda):  # PyTorch takes its time to load, and nobody else has to know
        seen = seen_by_sampler(config) if seen is None else seen
        if name == EngineName.auto:
            name = EngineName.cuda.value if seen.usable else EngineName.torch.value
            why = f"PyTorch sees {seen.gpus[0]}" if seen.usable else seen.none
        elif not seen.usable:
            raise ConfigError(f"engine=cuda: {seen.none} on this machine; engine=torch writes on the CPU")
    device, most = "cpu", engine.max_batch or CPU_BATCH
    if name == EngineName.cuda:  # beside the learner: what is published is copied on the GPU, or not at all
        device = device_of(config.learner.device if config.learner.device.startswith("cuda") else "cuda", seen)
        most = engine.max_batch or GPU_BATCH
    on_gpu = device != "cpu"
    theirs: tuple[Gpu, ...] = ()
    if name in FOREIGN:  # which take their GPUs by themselves
        theirs = (seen_by_sampler(config) if seen is None else seen).gpus
        most = _server_batch(config, theirs)
    return Chosen(
        engine=name,
        why=why,
        device=device,
        precision=config.model.precision or _narrow_on("cuda" if theirs else device),
        batch_invariant=not on_gpu if engine.batch_invariant is None else engine.batch_invariant,
        max_batch=most,
        episodes=config.rollout.concurrency or (2 * most if on_gpu or name in FOREIGN else EPISODES),
    )


def _server_batch(config: Config, gpus: tuple[Gpu, ...]) -> int:
    """Sequences that all servers of vLLM or SGLang decode together: as they are told, else as vLLM does by itself."""
    from turnwise.engines.server_gpus import named_options  # which needs this file

    engine = config.engine
    told = {name.replace("_", "-"): value for name, value in named_options(engine.server_options)}
    given = next((told[name] for name in ("--max-num-seqs", "--max-running-requests") if name in told), "")
    each = SERVER_BATCH
    if engine.max_batch or given.isdecimal():
        each = int(given) if given.isdecimal() else engine.max_batch or 0
    elif not gpus and not engine.servers:
        each = EPISODES // 2
    elif gpus and min(gpu.memory for gpu in gpus) >= LARGE_GPU:
        each = LARGE_SERVER_BATCH
    servers = 1 if engine.name == EngineName.vllm else len(engine.servers) or engine.replicas
    samplers = 1 if config.cluster.name is ClusterName.none else config.cluster.samplers
    return max(1, each) * servers * samplers


def device_of(wanted: str, seen: Seen | None = None) -> str:
    """`learner.device` as cpu or cuda:N; one that is not there is a ConfigError."""
    if wanted == "cpu":
        return wanted
    if not re.fullmatch(r"auto|cuda(:\d{1,3})?", wanted):
        raise ConfigError(f"learner.device={wanted}: auto, cpu or cuda, or one GPU such as cuda:0")
    seen = look() if seen is None else seen
    if wanted == "auto" and not seen.usable:
        return "cpu"
    if seen.unfit:
        raise ConfigError(f"learner.device={wanted}: {seen.none}")
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


def rank_devices(config: Config, seen: Seen | None = None, *, samples: bool = True) -> tuple[str, ...]:
    """Where the processes of a sharded learner compute: a GPU each, behind the one that this process samples on, or all
    on the CPU. What cannot be is a ConfigError."""
    learner, count = config.learner, config.learner.processes
    if learner.context_parallel > 1:
        raise ConfigError(
            f"learner.context_parallel={learner.context_parallel}: torch shares the tokens of a sequence for plain "
            "attention on a GPU only, and the learner packs sequences; set it to 1 (shorter passes: "
            "learner.token_budget, learner.gradient_checkpointing=true)"
        )
    if count == 1:
        return (device_of(learner.device, seen),)
    if learner.optimizer is OptimizerName.adamw8bit:
        raise ConfigError(
            f"learner.processes={count}: learner.optimizer=adamw8bit keeps blocks of moments that no shard follows; "
            "take adamw, whose state is shared out over the processes"
        )
    if ":" in learner.device:
        raise ConfigError(f"learner.processes={count} takes a GPU each: set learner.device=cuda, not {learner.device}")
    if device_of(learner.device, seen) == "cpu":
        return ("cpu",) * count
    if config.cluster.name is not ClusterName.none:
        if config.cluster.learner_gpus != 1:
            raise ConfigError(
                f"learner.processes={count} takes a GPU each, and cluster.learner_gpus is what each of them reserves: "
                f"set it to 1, not {config.cluster.learner_gpus:g}"
            )
        return ("cuda:0",) * count  # the only one that each sees
    gpus = len((look() if seen is None else seen).gpus)
    first = 1 if samples and choose(config, seen).on_gpu else 0
    if first + count > gpus:
        sampler = " and the sampler one more" if first else ""
        raise ConfigError(
            f"learner.processes={count} takes a GPU each{sampler}: this machine has {gpus}; lower it, or set "
            "learner.device=cpu"
        )
    return tuple(f"cuda:{first + number}" for number in range(count))


def _narrow_on(device: str) -> Precision:
    return Precision.float32 if device == "cpu" else Precision.bfloat16

"""The one place that says what `auto` and null mean here: which engine, device, precision and batch, and why."""

import math
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Protocol

from turnwise import extensions
from turnwise.config import ONE_MACHINE, Config, LearnerConfig
from turnwise.config.choices import LearnerPlace, ModelImplementation, OptimizerName, Precision
from turnwise.engines.opener import opener_of, sharded_learners
from turnwise.errors import ConfigError
from turnwise.system.plugins import load

CPU_BATCH, GPU_BATCH = 64, 1024
"""Sequences decoded together."""
EPISODES = 256
"""Under way at once, where no GPU waits for them."""
LEAST_CAPABILITY = 8
"""Of a GPU: the first number of its compute capability."""
MOST_WORKERS, CORES_OF_A_RUN = 4, 4
"""Episode workers where nobody says: so many keep the process of a run busy, which has its event loop, the sampler's
thread, the learner's launches and the recorder beside them."""
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
class VisibleGpus:
    """What PyTorch sees of this machine."""

    gpus: tuple[Gpu, ...] = ()
    unfit: str = ""
    """Why they cannot be used, although they are there."""

    @property
    def none(self) -> str:
        """Why this machine has no GPU that can be used."""
        return f"PyTorch sees {self.gpus[0]}, but {self.unfit}" if self.unfit else "PyTorch sees no GPU"

    @property
    def usable(self) -> bool:
        """Whether there is a GPU to use."""
        return bool(self.gpus) and not self.unfit


@dataclass(frozen=True, slots=True)
class EngineChoice:
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


def visible_gpus() -> VisibleGpus:
    """The GPUs that PyTorch sees now, and why they cannot be used, if so."""
    import torch

    if not torch.cuda.is_available():
        return VisibleGpus()
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    unfit = ""
    if find_spec("triton") is None:
        unfit = "Triton, in which its kernels are written, is not installed"
    elif min(device.major for device in devices) < LEAST_CAPABILITY:
        unfit = f"Triton and bfloat16 need compute capability {LEAST_CAPABILITY}.0"
    return VisibleGpus(tuple(Gpu(device.name, device.total_memory) for device in devices), unfit)


class Reservations(Protocol):
    """What a placement of the table has set aside on other machines."""

    @property
    def samplers(self) -> int:
        """How many samplers there are at most."""
        ...

    @property
    def sampler_gpus(self) -> float:
        """How many GPUs each sampler has reserved."""
        ...

    @property
    def learner_gpus(self) -> float:
        """How many GPUs the learner has reserved, or each of its processes."""
        ...


def _engine_on(device: str) -> str:
    """The first engine of the table that computes on such a device here: what `auto` means."""
    return next(name for name, row in extensions.engines().items() if row.device == device)


def reservations(config: Config) -> Reservations | None:
    """Those of a config; None where everything is on this machine."""
    if config.cluster == ONE_MACHINE:
        return None
    there: Reservations = load(extensions.rows("places")[config.cluster].place, "cluster")(config)
    return there


def gpus_for_sampler(config: Config) -> VisibleGpus:
    """What there is where the sampler runs: here, or on the nodes of a cluster what it reserves there."""
    return _gpus_with(None if (there := reservations(config)) is None else there.sampler_gpus)


def gpus_for_learner(config: Config) -> VisibleGpus:
    """The GPUs that the learner's process sees, by the config's cluster."""
    return _gpus_with(None if (there := reservations(config)) is None else there.learner_gpus)


def _gpus_with(reserved: float | None) -> VisibleGpus:
    if reserved is None:
        return visible_gpus()
    return VisibleGpus((Gpu("a GPU of the cluster", 0),) * math.ceil(reserved))


def choose(config: Config, visible: VisibleGpus | None = None) -> EngineChoice:
    """What a config means on a machine that has this; an engine of a GPU without one is a ConfigError."""
    engine = config.engine
    name, why = engine.name, ""
    device = extensions.engine(name).device
    if device in ("auto", "cuda"):  # PyTorch takes its time to load, and nobody else has to know
        visible = gpus_for_sampler(config) if visible is None else visible
        if device == "auto":
            name = _engine_on("cuda" if visible.usable else "cpu")
            device = extensions.engine(name).device
            why = f"PyTorch sees {visible.gpus[0]}" if visible.usable else visible.none
        elif not visible.usable:
            raise ConfigError(
                f"engine={name}: {visible.none} on this machine; engine={_engine_on('cpu')} writes on the CPU"
            )
    on_gpu, most, episodes = device == "cuda", engine.max_batch or CPU_BATCH, EPISODES
    where = narrow = "cpu"
    if on_gpu:  # beside the learner: what is published is copied on the GPU, or not at all
        where = narrow = device_of(
            config.learner.device if config.learner.device.startswith("cuda") else "cuda", visible
        )
        most = engine.max_batch or GPU_BATCH
        episodes = 2 * most
    elif device == "own" and name in extensions.engines():
        gpus = (gpus_for_sampler(config) if visible is None else visible).gpus
        if (sequences := opener_of(config).sequences(config, gpus)) is not None:
            most, episodes, narrow = sequences, 2 * sequences, "cuda" if gpus else "cpu"
    return EngineChoice(
        engine=name,
        why=why,
        device=where,
        precision=config.model.precision or _narrow_on(narrow),
        batch_invariant=not on_gpu if engine.batch_invariant is None else engine.batch_invariant,
        max_batch=most,
        episodes=config.rollout.concurrency or episodes,
    )


def episode_workers(config: Config, visible: VisibleGpus | None = None) -> int:
    """How many processes play episodes: on a CPU that also computes none, since the cores are the engine's."""
    if config.rollout.workers is not None:
        return config.rollout.workers
    device = extensions.engine(config.engine.name).device
    if config.cluster != ONE_MACHINE or device not in ("auto", "cuda", "own"):
        return 0
    visible = gpus_for_sampler(config) if visible is None else visible
    server = config.engine.name in extensions.engines() and device == "own"
    if not (choose(config, visible).on_gpu or (server and visible.usable)):
        return 0
    from turnwise.engines.samplers.cpu.threads import usable_cores

    return max(0, min(MOST_WORKERS, usable_cores() - CORES_OF_A_RUN))


def published_format(config: Config) -> Precision:
    """The number format that weights are published in: the sampler's, so that no more travels than it keeps. Of a
    sampler of the user's and of servers that somebody else started it is not known: float32, which loses nothing."""
    told = "model.precision" in extensions.engine(config.engine.name).reads
    if not told or (config.model.precision is None and opener_of(config).keeps_weights(config)):
        return Precision.float32
    return choose(config).precision


def device_of(wanted: str, visible: VisibleGpus | None = None) -> str:
    """`learner.device` as cpu or cuda:N; one that is not there is a ConfigError."""
    if wanted == "cpu":
        return wanted
    if not re.fullmatch(r"auto|cuda(:\d{1,3})?", wanted):
        raise ConfigError(f"learner.device={wanted}: auto, cpu or cuda, or one GPU such as cuda:0")
    visible = visible_gpus() if visible is None else visible
    if wanted == "auto" and not visible.usable:
        return "cpu"
    if visible.unfit:
        raise ConfigError(f"learner.device={wanted}: {visible.none}")
    if not visible.gpus:
        raise ConfigError(f"learner.device={wanted}: PyTorch finds no CUDA device on this machine")
    number = int(wanted.partition(":")[2] or 0)
    if number >= len(visible.gpus):
        raise ConfigError(f"learner.device={wanted}: this machine has {len(visible.gpus)} CUDA device(s)")
    return f"cuda:{number}"


def learner_here(config: LearnerConfig, visible: VisibleGpus | None = None) -> LearnerConfig:
    """The learner's knobs with nothing left open but what the memory plan decides."""
    device = device_of(config.device, visible)
    return replace(config, device=device, precision=config.precision or _narrow_on(device))


def shares_gpu(config: Config, visible: VisibleGpus | None = None) -> bool:
    """Whether sampler and learner of a training compute on one GPU of this machine."""
    if config.cluster != ONE_MACHINE or config.learner.processes > 1:
        return False
    where = choose(config, visible).device
    return where != "cpu" and where == device_of(config.learner.device, visible)


def learner_place(config: Config, visible: VisibleGpus | None = None) -> LearnerPlace:
    """Where the learner of a training is, never `auto`; several ranks and actors of a cluster have places of their own,
    and count as here. What cannot be is a ConfigError."""
    place = config.learner.place
    if place is LearnerPlace.here or config.cluster != ONE_MACHINE or config.learner.processes > 1:
        return LearnerPlace.here
    if place is LearnerPlace.auto:
        apart = config.training.max_lag > 0 and shares_gpu(config, visible)
        return LearnerPlace.process if apart else LearnerPlace.here
    if config.engine.sleep and shares_gpu(config, visible):
        raise ConfigError(
            "learner.place=process with engine.sleep=true: on one GPU each of two processes keeps its memory and the "
            "sampler has none to lend; set learner.place=here, or engine.sleep=null"
        )
    return place


def shares_weights(config: Config, chosen: EngineChoice, implementation: ModelImplementation) -> bool:
    """Whether sampler and learner on one GPU compute with the same tensors, so that publishing copies nothing.

    Not when the sampler goes on with old weights while the learner changes its own.
    """
    same = config.learner.precision in (None, Precision.bfloat16) and chosen.precision is Precision.bfloat16
    native = implementation is ModelImplementation.native
    return same and native and config.training.max_lag == 0 and not config.learner.lora_rank


def rank_devices(config: Config, visible: VisibleGpus | None = None, *, samples: bool = True) -> tuple[str, ...]:
    """Where the processes of a sharded learner compute: a GPU each, behind the one that this process samples on, or all
    on the CPU. What cannot be is a ConfigError."""
    learner, count = config.learner, config.learner.processes
    sharded_learners().replicas(config)
    if count == 1:
        return (device_of(learner.device, visible),)
    if learner.optimizer is OptimizerName.adamw8bit:
        raise ConfigError(
            f"learner.processes={count}: learner.optimizer=adamw8bit keeps moments in blocks that cannot be sharded; "
            "use adamw, whose state is sharded over the processes"
        )
    if ":" in learner.device:
        raise ConfigError(f"learner.processes={count} takes a GPU each: set learner.device=cuda, not {learner.device}")
    if device_of(learner.device, visible) == "cpu":
        return ("cpu",) * count
    if (there := reservations(config)) is not None:
        if there.learner_gpus != 1:
            raise ConfigError(
                f"learner.processes={count} takes a GPU each, and {config.cluster}.learner_gpus is what each of "
                f"them reserves: set it to 1, not {there.learner_gpus:g}"
            )
        return ("cuda:0",) * count  # the only one that each sees
    gpus = len((visible_gpus() if visible is None else visible).gpus)
    first = 1 if samples and choose(config, visible).on_gpu else 0
    if first + count > gpus:
        sampler = " and the sampler one more" if first else ""
        raise ConfigError(
            f"learner.processes={count} takes a GPU each{sampler}: this machine has {gpus}; lower it, or set "
            "learner.device=cpu"
        )
    return tuple(f"cuda:{first + number}" for number in range(count))


def _narrow_on(device: str) -> Precision:
    return Precision.float32 if device == "cpu" else Precision.bfloat16

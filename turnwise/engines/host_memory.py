"""What a learner on a GPU keeps in the machine's own memory and what checkpoints take of a disk, known beforehand."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turnwise import extensions
from turnwise.config import ONE_MACHINE, Config
from turnwise.config.choices import LearnerPlace, Offload, OptimizerName, Precision
from turnwise.config.evaluation_sampling import longest_turn
from turnwise.config.training import LAST
from turnwise.engines.devices import (
    TOKEN_BUDGET,
    choose,
    device_of,
    gpus_for_learner,
    learner_place,
    published_format,
    visible_gpus,
)
from turnwise.engines.memory_plan import ModelSize, Training, facts_of, size_of
from turnwise.engines.opener import dtype_of, sharded_learners
from turnwise.errors import ConfigError
from turnwise.system.resources import free_memory


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of an optimizer that lies in the CPU's memory (`learner.offload=optimizer`)."""

    masters: int
    """The float32 weights."""
    moments: int
    gradients: int
    """Page-locked, for gradients on their way down."""
    rounded: int
    """Page-locked, for narrow weights on their way up."""

    @property
    def bytes(self) -> int:
        """All of it, which is there from the first update on."""
        return self.masters + self.moments + self.gradients + self.rounded

    def line(self) -> str:
        """The line of `turnwise plan` about the machine's own memory."""
        parts = {
            "float32 weights": self.masters,
            "moments": self.moments,
            "gradients on their way down": self.gradients,
            "rounded weights on their way up": self.rounded,
        }
        named = ", ".join(f"{_gib(size)} {name}" for name, size in parts.items() if size)
        return f"of the machine's own memory {_gib(self.bytes)} (learner.offload=optimizer): {named}"


def host_memory(config: Config, training: Training) -> HostMemory | None:
    """Of the config's learner; None where its optimizer lies where it computes."""
    learner = config.learner
    if learner.offload is not Offload.optimizer or device_of(learner.device, gpus_for_learner(config)) == "cpu":
        return None
    facts = facts_of(config)
    size = size_of(facts)
    if size is None:
        return None
    own_critic = training.critic and not learner.shared_critic
    trained = size.trained(learner)
    if learner.processes > 1:  # FSDP2 keeps weights, gradients and moments of all ranks there
        copies = (2 if own_critic else 1) * sharded_learners().replicas(config)
        return HostMemory(4 * copies * trained, 8 * copies * trained, 4 * copies * trained, 0)
    narrow = (learner.precision or Precision.bfloat16) is Precision.bfloat16 and not learner.lora_rank
    tensors = facts.tensors if not learner.lora_rank and sum(facts.tensors) == trained else None
    policy = _optimizer(trained, tensors, config, narrow=narrow)
    if not own_critic:
        return policy
    critic = _optimizer(size.trainable(learner), facts.tensors or None, config, narrow=narrow)
    return HostMemory(*(a + b for a, b in zip(_parts(policy), _parts(critic), strict=True)))


def _parts(memory: HostMemory) -> tuple[int, ...]:
    return memory.masters, memory.moments, memory.gradients, memory.rounded


def _optimizer(trained: int, tensors: tuple[int, ...] | None, config: Config, *, narrow: bool) -> HostMemory:
    """Of one model; where the sizes of its tensors are not known, as much as page-locked ones may take."""

    def locked(itemsize: int) -> int:
        return sum(page_locked(n * itemsize) for n in tensors) if tensors else 2 * trained * itemsize

    moments = (2 if config.learner.optimizer is OptimizerName.adamw8bit else 8) * trained
    return HostMemory(4 * trained if narrow else locked(4), moments, locked(4), locked(2) if narrow else 0)


def page_locked(size: int) -> int:
    """Bytes that torch's allocator of page-locked memory takes for a tensor: the next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def check_host_memory(config: Config, training: Training, free: int | None = None) -> None:
    """Refuse a learner whose optimizer does not fit into the memory that is free (`free`: as measured): the kernel
    would end the run in its first update without a word."""
    needed = host_memory(config, training)
    if needed is None or (free is None and sys.platform != "linux"):
        return
    if config.cluster != ONE_MACHINE:  # its memory is that of another machine
        return
    free = free_memory() if free is None else free
    if needed.bytes > free:
        raise ConfigError(
            f"learner.offload=optimizer keeps {_gib(needed.bytes)} in the machine's own memory, of which {_gib(free)} "
            f"are free here ({needed.line().partition(': ')[2]}); what helps: learner.optimizer=adamw8bit, on the GPU "
            "(learner.offload=none) or here, learner.lora_rank=16, a machine with more memory"
        )


def cpu_memory(config: Config, training: Training | None) -> Iterator[str]:
    """What sampler and learner take of the machine's own memory, for those of them that compute on the CPU."""
    visible = visible_gpus()
    samples = extensions.engine(config.engine.name).here and not (chosen := choose(config, visible)).on_gpu
    learns = training is not None and device_of(config.learner.device, visible) == "cpu"
    if not (samples or learns):
        return
    facts = facts_of(config)
    size = size_of(facts)
    if size is None:
        yield "CPU memory: unknown, config.json does not tell the model's size"
        return
    if samples:
        length = config.data.max_prompt_tokens + (config.rollout.max_tokens or 4 * longest_turn(config))
        length = length if facts.context_length is None else min(length, facts.context_length)
        itemsize = dtype_of(chosen.precision).itemsize
        cache = _size(chosen.max_batch * length * size.cached * itemsize)
        weights = _size(size.weights * itemsize)
        most = f"{chosen.max_batch} sequences of {length:,} tokens"
        vision = f" ({_size(size.vision * itemsize)} of it for vision)" if size.vision else ""
        yield f"CPU memory, sampler: weights {weights}{vision}, cache {cache} at most ({most})"
    if learns and training is not None:
        learner = config.learner
        trained = size.trained(learner)
        models = 1 + (training.critic and not learner.shared_critic) + (training.reference and not learner.lora_rank)
        tokens = learner.token_budget or TOKEN_BUDGET
        activations = size.activations(tokens, 4, recompute=bool(learner.gradient_checkpointing)) + size.scores()
        moments = 2 if learner.optimizer is OptimizerName.adamw8bit else 8
        yield (
            f"CPU memory, learner: weights {_size(4 * models * size.weights)}, gradients and optimizer "
            f"{_size((4 + moments) * trained)}, activations {_size(activations)} at most (passes of {tokens:,} tokens)"
        )
        if learner_place(config, visible) is LearnerPlace.process:
            block = size.weights * dtype_of(published_format(config)).itemsize
            yield f"CPU memory, weights on their way from the learner's own process: {_size(block)}"


# --- disk -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Bytes on disk of one checkpoint, and how many are there at once."""

    policy: int
    """The Hugging Face folder."""
    state: int
    """float32 weights and moments of what is trained."""
    most: int
    best: int = 0
    """A second copy of the policy, of the best evaluation (training.ship)."""

    @property
    def total(self) -> int:
        """Bytes of all that may be there at once."""
        return self.each * self.most + self.best

    @property
    def each(self) -> int:
        """The bytes of one checkpoint: the policy's and the learner's state."""
        return self.policy + self.state

    def line(self) -> str:
        """The line of `turnwise plan` about the size and number of checkpoints."""
        best = " beside the best policy" if self.best else ""
        return (
            f"a checkpoint takes about {_size(self.each)} ({_size(self.policy)} the policy, {_size(self.state)} the "
            f"learner's state), and up to {self.most} exist at once{best}: {_size(self.total)}"
        )


def checkpoints(config: Config, training: Training) -> Checkpoints | None:
    """What a run with this config writes; its last step is always saved. None where config.json does not tell."""
    size = size_of(facts_of(config))
    if size is None:
        return None
    options = config.training
    written = min(options.keep + 1, 1 + (-(-options.steps // options.save_every) if options.save_every else 0))
    policy = _policy(config, size)
    best = policy if options.ship != LAST else 0
    return Checkpoints(policy, _state(config, size, training), max(1, written), best)


def _policy(config: Config, size: ModelSize) -> int:
    learner = config.learner
    on_gpu = device_of(learner.device, gpus_for_learner(config)) != "cpu"
    narrow = on_gpu and (learner.precision or Precision.bfloat16) is Precision.bfloat16 and not learner.lora_rank
    return size.weights * (2 if narrow else 4)


def _state(config: Config, size: ModelSize, training: Training) -> int:
    learner = config.learner
    each = 4 + (2 if learner.optimizer is OptimizerName.adamw8bit else 8)
    critic = size.trainable(learner) if training.critic and not learner.shared_critic else 0
    return each * (size.trained(learner) + critic)


def check_disk(config: Config, training: Training, free: int | None = None) -> Iterator[str]:
    """Refuse a run whose disk (`free`: as measured) has no room for its last checkpoint; a warning where there is none
    for all that it keeps."""
    needed = checkpoints(config, training)
    if needed is None:
        return
    folder = Path.cwd() / config.runs_dir
    free = (
        shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        if free is None
        else free
    )
    advice = "what helps: training.save_every=0 (the last one only), learner.lora_rank, runs_dir on another disk"
    if needed.each > free:
        raise ConfigError(
            f"{folder} has {_size(free)} left, and a run ends with a checkpoint of {_size(needed.each)}; {advice}"
        )
    if needed.total > free:
        yield (
            f"{folder} has {_size(free)} left, and the run may hold {_size(needed.total)} at once ({needed.most} "
            f"checkpoints of {_size(needed.each)}); {advice}, training.ship=last, or a smaller training.keep"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _size(size: int) -> str:
    return _gib(size) if size >= 2**29 else f"{size / 2**20:.1f} MiB"

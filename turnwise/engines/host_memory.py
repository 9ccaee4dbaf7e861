"""What sampler and learner take of the machine's own memory, known before a model is read; too much is refused."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from turnwise import extensions
from turnwise.config import ONE_MACHINE, Config
from turnwise.config.choices import LearnerPlace, Offload, OptimizerName
from turnwise.config.evaluation_sampling import longest_turn
from turnwise.engines.devices import (
    TOKEN_BUDGET,
    choose,
    device_of,
    gpus_for_learner,
    learner_place,
    published_format,
    shares_gpu,
)
from turnwise.engines.memory_plan import (
    BUFFERS,
    ModelSize,
    Training,
    buffer_bytes,
    facts_of,
    in_words,
    itemsize_of,
    size_of,
)
from turnwise.engines.opener import sharded_learners
from turnwise.errors import ConfigError
from turnwise.system.resources import free_memory

PROCESS = 545 << 20
"""The interpreter, PyTorch and what a run imports and keeps, on a CPU."""
CUDA = 3 << 30
"""CUDA's libraries and their pages, where a GPU is used: an estimate."""
LOGIT_ROWS, LOGIT_COPIES = 1024, 3
"""Of the learner on a CPU: rows whose logits are there at once, and how often (scores, their softmax, its gradient)."""
HEAP, MORE_HEAPS = 1.35, 1.75
"""What comes and goes takes so many times its size: the C library keeps pieces of what was freed. Measured: 1.3 to 1.5
in a fine-tuning; more where the sampler's threads and the learner's each have a heap."""
STEP_COPIES = 7
"""Of a buffer, in a step on 8-bit moments."""
GROWTH = 1.5
"""A CPU's cache is copied when it grows: old and new are there together."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one thing: `Held("learner", "moments", 4_334_080)`."""

    owner: str
    what: str
    bytes: int
    passing: bool = False
    """Only for a time, and never with another such thing of the same owner."""
    certain: bool = True
    """Whether every run has all of it; a cache and a pass may stay smaller."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What a run's process may hold at most of the machine's own memory."""

    held: tuple[Held, ...]

    @property
    def bytes(self) -> int:
        """All of it; of what passes, the largest of each owner."""
        passing: dict[str, int] = {}
        for each in self.held:
            if each.passing:
                passing[each.owner] = max(passing.get(each.owner, 0), each.bytes)
        return sum(each.bytes for each in self.held if not each.passing) + sum(passing.values())

    def lines(self) -> Iterator[str]:
        """The lines of the plan about the machine's own memory."""
        for owner in dict.fromkeys(each.owner for each in self.held):
            named = ", ".join(f"{each.what} {in_words(each.bytes)}" for each in self.held if each.owner == owner)
            yield f"CPU memory, {owner}: {named}"
        yield self.in_all()

    def in_all(self) -> str:
        """The last of these lines."""
        return f"CPU memory, in all: {in_words(self.bytes)} at most"


def host_memory(config: Config, training: Training | None, *, samples: bool = True) -> HostMemory | None:
    """Of an evaluation (`training` None), of a training, or (`samples` False) of a fine-tuning. None where config.json
    does not tell the model's size, or no model is here."""
    here = samples and extensions.engine(config.engine.name).here
    if training is None and not here:  # a model that writes elsewhere, or a tokenizer alone
        return None
    facts = facts_of(config)
    size = size_of(facts)
    if size is None:
        return None
    on_gpu = here and choose(config).on_gpu
    device = None if training is None else device_of(config.learner.device, gpus_for_learner(config))
    cuda = CUDA if on_gpu or (device or "cpu") != "cpu" else 0
    held = [Held("process", "libraries and records", PROCESS + cuda)]
    if here and not on_gpu:
        held += _sampler(config, size, facts.context_length)
    elif here and training is None:
        read = itemsize_of(choose(config).precision) * size.weights
        held.append(Held("sampler", "weights while they are read", read))
    if training is not None:
        heap = MORE_HEAPS if here and not on_gpu else HEAP
        held += _on_cpu(config, size, training, heap) if device == "cpu" else _beside_gpu(config, size, training)
        if samples and learner_place(config) is LearnerPlace.process:
            held.append(Held("learner", "a process of its own", PROCESS + cuda))
            if not shares_gpu(config):
                block = size.weights * itemsize_of(published_format(config))
                held.append(Held("learner", "weights on their way", block))
    return HostMemory(tuple(each for each in held if each.bytes))


def _sampler(config: Config, size: ModelSize, context: int | None) -> Iterator[Held]:
    chosen = choose(config)
    length = config.data.max_prompt_tokens + (config.rollout.max_tokens or 4 * longest_turn(config))
    length = length if context is None else min(length, context)
    itemsize = itemsize_of(chosen.precision)
    copies = 1 if chosen.batch_invariant else 2  # once more in a layout for products
    yield Held("sampler", "weights", copies * size.weights * itemsize)
    rows, per_token = min(chosen.max_batch, chosen.episodes, _episodes(config)), size.cached * itemsize
    most = f"{rows} sequences of {length:,} tokens"
    yield Held("sampler", f"cache ({most})", int(GROWTH * rows * length * per_token), certain=False)


def _episodes(config: Config) -> int:
    """The most that are under way at once, of steps or of evaluations."""
    training, played = config.training, config.eval.samples
    step = training.groups * training.group_size * (1 + training.max_lag)
    return step if played is None else max(step, played * config.eval.group_size)


def _models(config: Config, training: Training) -> int:
    learner = config.learner
    own_critic = training.critic and not learner.shared_critic
    return 1 + own_critic + (training.reference and not learner.lora_rank)


def _trained(config: Config, size: ModelSize, training: Training) -> int:
    """Numbers with a gradient, a critic's among them."""
    learner = config.learner
    own_critic = training.critic and not learner.shared_critic
    return size.trained(learner) + (size.trainable(learner) if own_critic else 0)


def _moments(kind: OptimizerName) -> int:
    return 2 if kind is OptimizerName.adamw8bit else 8


def optimizer_bytes(kind: OptimizerName, numbers: int) -> int:
    """Of masters and moments that lie in the machine's own memory."""
    return (4 + _moments(kind)) * numbers


def buffers_bytes(kind: OptimizerName, numbers: int) -> int:
    """Of what a step on them needs beside."""
    copies = STEP_COPIES if kind is OptimizerName.adamw8bit else 0
    return (BUFFERS + copies) * buffer_bytes(numbers)


def _on_cpu(config: Config, size: ModelSize, training: Training, heap: float) -> Iterator[Held]:
    learner, ranks = config.learner, config.learner.processes
    copies = sharded_learners().replicas(config) if ranks > 1 else 1
    trained = _trained(config, size, training)
    yield Held("learner", "weights", 4 * copies * _models(config, training) * size.weights)
    yield Held("learner", "moments", _moments(config.learner.optimizer) * copies * trained)
    gradients = 4 * copies * trained
    yield Held("learner", "gradients", gradients)
    tokens = learner.token_budget or TOKEN_BUDGET
    activations = size.activations(tokens, 4, recompute=bool(learner.gradient_checkpointing))
    logits = LOGIT_COPIES * 4 * LOGIT_ROWS * size.vocabulary
    # The gradients of a pass lie beside the sum of those before it, and the heap keeps a part of what was freed.
    passing = int(heap * (ranks * (activations + logits) + 2 * gradients)) - gradients
    yield Held("learner", f"a pass of {tokens:,} tokens", passing, certain=False)
    if ranks > 1:
        yield Held("learner", f"{ranks} processes", ranks * PROCESS)


def _beside_gpu(config: Config, size: ModelSize, training: Training) -> Iterator[Held]:
    """Of a learner on a GPU: what it reads, and with `learner.offload=optimizer` masters, moments and buffers."""
    learner = config.learner
    trained = _trained(config, size, training)
    offloads = learner.offload is Offload.optimizer
    if learner.processes > 1:  # FSDP2 keeps weights, gradients and moments of all ranks there
        if offloads:
            copies = sharded_learners().replicas(config)
            yield Held("learner", "weights", 4 * copies * trained)
            yield Held("learner", "gradients", 4 * copies * trained)
            yield Held("learner", "moments", _moments(learner.optimizer) * copies * trained)
        return
    read = 4 * (1 + (training.critic and not learner.shared_critic)) * size.weights
    if not offloads:
        yield Held("learner", "float32 weights while they are read", read)
        return
    yield Held("learner", "float32 weights", 4 * trained)
    # What was read lies beside the masters until the learner is open; moments come with the first update.
    yield Held("learner", "moments", _moments(learner.optimizer) * trained, passing=True)
    yield Held("learner", "float32 weights while they are read", read, passing=True)
    models = 1 + (training.critic and not learner.shared_critic)
    buffers = models * buffers_bytes(learner.optimizer, size.trained(learner))
    yield Held("learner", "buffers between the two", buffers)


def check_host_memory(
    config: Config, training: Training | None, *, samples: bool = True, free: int | None = None
) -> None:
    """Refuse a run whose weights and optimizer do not fit into the memory that is free (`free`: as measured): the
    kernel would end it without a word. What depends on lengths is not held against it."""
    if config.cluster != ONE_MACHINE or (free is None and sys.platform != "linux"):
        return  # the memory of another machine, or of one that does not say
    needed = host_memory(config, training, samples=samples)
    if needed is None:
        return
    free = free_memory() if free is None else free
    certain = HostMemory(tuple(each for each in needed.held if each.certain))
    if certain.bytes > free:
        offloads = training is not None and config.learner.offload is Offload.optimizer
        helps = "on the GPU (learner.offload=none) or here, " if offloads else ""
        advice = "learner.optimizer=adamw8bit, " + helps + "learner.lora_rank=16, " if training is not None else ""
        raise ConfigError(
            f"the run needs {in_words(certain.bytes)} of the machine's own memory, of which {in_words(free)} are free "
            f"here ({'; '.join(line.removeprefix('CPU memory, ') for line in certain.lines())}); what helps: {advice}"
            "a smaller model, a machine with more memory"
        )

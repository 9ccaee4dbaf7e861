"""Who gets how much of a GPU's memory: weights, optimizer, activations, cache; and whether they must take turns."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from turnwise import extensions
from turnwise.config import ONE_MACHINE, Config, LearnerConfig
from turnwise.config.choices import LearnerPlace, Offload, OptimizerName, Precision
from turnwise.config.evaluation_sampling import longest_turn
from turnwise.engines.devices import (
    TOKEN_BUDGET,
    EngineChoice,
    Gpu,
    VisibleGpus,
    choose,
    device_of,
    learner_place,
    shares_weights,
    visible_gpus,
)
from turnwise.engines.model.sources import find_model
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.engines.model.loading import ImplementationChoice, ModelFacts

OVERHEAD = 2 * 2**30
"""What CUDA itself, cuBLAS, the graphs and the gaps between blocks take."""
SCORED_ROWS, SCORED_BYTES = 16_384, 3 * 2**30
"""Float32 logits of so many rows are there at once with their gradient, but no more bytes than these."""
KEPT_FEATURES = 512 << 20
"""Of images, in sampler and learner each (`model/image_features.py`)."""
BUFFERS, BUFFER_BYTES = 2, 256 << 20
"""Between a GPU and the CPU's memory, where the optimizer lies there: their number, and the most bytes of one. torch
rounds page-locked memory up to powers of two."""
LARGEST_BUDGET, LEAST_BUDGET = 65_536, 1024
PAGE = 32
"""Tokens of a page of the cache."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """`ModelSize(weights=134_515_008, hidden=576, layers=30, vocabulary=49_152, cached=11_520)`."""

    weights: int
    """Numbers in all."""
    hidden: int
    layers: int
    vocabulary: int
    cached: int
    """Keys and values of one token in all layers, as numbers."""
    vision: int = 0
    """Of the weights: those of tower and projector, which no text goes through."""

    @property
    def _width(self) -> float:
        """Outputs of a layer's products for one token: their weights divided by the hidden size."""
        inside = max(self.weights - self.vision - self.vocabulary * self.hidden, 0)
        return inside / (self.layers * self.hidden)

    def activations(self, tokens: int, itemsize: int, *, recompute: bool) -> int:
        """Bytes that a pass over so many tokens keeps for its backward."""
        one_layer = 5 * self.hidden + 1.25 * self._width
        numbers = self.layers * self.hidden + one_layer if recompute else self.layers * one_layer
        return int(1.1 * tokens * numbers * itemsize)

    def scores(self) -> int:
        """Bytes of the logits that are there at once."""
        return min(SCORED_BYTES, 2 * 4 * SCORED_ROWS * self.vocabulary)

    def trained(self, learner: LearnerConfig) -> int:
        """Numbers that have a gradient."""
        return self.adapter(learner.lora_rank) if learner.lora_rank else self.trainable(learner)

    def trainable(self, learner: LearnerConfig) -> int:
        """Numbers that would have one without an adapter."""
        return self.weights if learner.train_vision else self.weights - self.vision

    def adapter(self, rank: int) -> int:
        """About the numbers of LoRA's factors."""
        return int(rank * self.layers * (6 * self.hidden + self._width))


def buffer_bytes(numbers: int) -> int:
    """Of one buffer for the gradients and weights of a model that trains so many numbers: a quarter of them at most, so
    that one is worked on while another travels."""
    return min(BUFFER_BYTES, 1 << max(numbers - 1, 1023).bit_length())


@dataclass(frozen=True, slots=True)
class Training:
    """What a learner has beside the policy, where one is on the same GPU."""

    critic: bool = False
    reference: bool = False


class MemoryHolder(Enum):
    """What one process holds of a plan."""

    both = "both"
    sampler = "sampler"
    learner = "learner"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one GPU by who has them, all of it there at once unless `takes_turns`."""

    gpu: Gpu
    fraction: float
    weights: int
    """That sampler and learner compute with; once, where they share them."""
    copies: int
    optimizer: int
    """float32 weights and moments."""
    others: int
    """Reference and critic."""
    learning: int
    """Gradients, activations and logits of the learner's largest pass."""
    cache: int
    cached_tokens: int
    token_budget: int
    recompute: bool
    takes_turns: bool
    """The cache is given back while the learner learns."""
    vision: int = 0
    """The part of `weights` that is towers and projectors."""
    apart: bool = False
    """The learner has a process of its own: nothing is shared, and CUDA is there twice."""
    handover: int = 0
    """New weights on their way from the learner's process to the sampler's."""
    writers: int = 0
    """The part of `weights` that nobody but the sampler computes with."""

    def share(self, part: MemoryHolder) -> int:
        """Bytes that the process with this part of the plan may hold, CUDA's own included: all that may be used, or
        what the other process leaves of it. Where the two take turns, each is left what the other gives back first."""
        if part is MemoryHolder.both:
            return self.usable
        writing = self.writers + self.handover + (KEPT_FEATURES if self.vision else 0) + self.overhead // 2
        if part is MemoryHolder.sampler:
            return writing + self.cache
        return self.usable - writing - (0 if self.takes_turns else self.cache)

    @property
    def usable(self) -> int:
        return int(self.gpu.memory * self.fraction)

    @property
    def overhead(self) -> int:
        return OVERHEAD * (2 if self.apart else 1)

    @property
    def learner_room(self) -> int:
        """What the learner's passes may take: what nobody else has while they run."""
        others = self.weights + self.optimizer + self.others + (0 if self.takes_turns else self.cache)
        return self.usable - self.overhead - self.features - self.handover - others

    @property
    def features(self) -> int:
        """Of images, kept by whoever has weights of his own."""
        return KEPT_FEATURES * self.copies if self.vision else 0

    def lines(self) -> Iterator[str]:
        """The lines of a small table that shows how the GPU's memory is shared out."""
        learns = bool(self.learning)
        how = ", the sampler's and the learner's" if self.copies == 2 else ", shared by sampler and learner"
        yield f"{self.gpu}, of which {_gib(self.usable)} may be used (engine.memory_fraction={self.fraction:g})"
        vision = f", {_gib(self.vision)} of it for vision" if self.vision else ""
        yield f"  weights      {_gib(self.weights)}{how if learns and self.cache else ''}{vision}"
        if self.features:
            yield f"  features     {_gib(self.features)} at most, of images"
        if learns:
            yield f"  optimizer    {_gib(self.optimizer)}"
        if self.others:
            yield f"  others       {_gib(self.others)}, reference and critic"
        if self.apart:
            yield f"  processes    {_gib(self.overhead)} for CUDA in two, {_gib(self.handover)} to hand weights over"
        if learns:
            activations = "activations recomputed" if self.recompute else "activations kept"
            yield f"  activations  {_gib(self.learning)} at most, passes of {self.token_budget:,} tokens, {activations}"
        if not self.cache:
            return
        turns = ", freed while the learner learns" if self.takes_turns else ""
        yield f"  cache        {_gib(self.cache)}, {self.cached_tokens:,} tokens{turns}"

    def as_json(self) -> dict[str, float | int | bool | str]:
        """The plan as plain values, for a JSON report."""
        return {
            "gpu": self.gpu.name, "memory": self.gpu.memory, "usable": self.usable, "weights": self.weights,
            "optimizer": self.optimizer, "others": self.others, "learning": self.learning, "cache": self.cache,
            "cached_tokens": self.cached_tokens, "token_budget": self.token_budget, "recompute": self.recompute,
            "takes_turns": self.takes_turns, "vision": self.vision, "apart": self.apart, "handover": self.handover,
        }  # fmt: skip


def memory_here(
    config: Config, training: Training | None, *, samples: bool = True, visible: VisibleGpus | None = None
) -> MemoryPlan | None:
    """The plan of a config on this machine, from its model's files: of an evaluation, of a training or (`samples`
    False) of a fine-tuning. None where no GPU of this machine is used, or a config.json does not tell what a cache
    holds."""
    if not extensions.engine(config.engine.name).here and training is None:
        return None
    if config.cluster != ONE_MACHINE and samples:  # each node makes its own
        return None
    visible = visible_gpus() if visible is None else visible
    chosen = choose(config, visible)
    sharded = config.learner.processes > 1  # on GPUs of its own, whose room it measures itself
    learner = "cpu" if training is None or sharded else device_of(config.learner.device, visible)
    on_gpu = samples and chosen.on_gpu
    where = chosen.device if on_gpu else learner
    if where == "cpu":
        return None
    choice, facts = _model_of(config)
    size = size_of(facts)
    if size is None:
        return None
    length = config.data.max_prompt_tokens + (config.rollout.max_tokens or 4 * longest_turn(config))
    length = length if facts.context_length is None else min(length, facts.context_length)
    both = on_gpu and learner == where
    apart = both and learner_place(config, visible) is LearnerPlace.process
    shared = both and not apart and shares_weights(config, chosen, choice.implementation)
    gpu = visible.gpus[int(where.removeprefix("cuda:"))]
    chosen = chosen if on_gpu else replace(chosen, device="cpu")
    beside = training if learner == where else None
    return plan_memory(config, chosen, gpu, size, length, beside, shared=shared, apart=apart)


def _model_of(config: Config) -> "tuple[ImplementationChoice, ModelFacts]":
    from turnwise.engines.model.loading import choose_implementation, model_facts

    source = find_model(config.model.path, config.model.trust_remote_code)
    choice = choose_implementation(source, config.model.implementation)
    return choice, model_facts(source, choice)


def facts_of(config: Config) -> "ModelFacts":
    """Of the config's model; no weight is read."""
    return _model_of(config)[1]


def size_of(facts: "ModelFacts") -> ModelSize | None:
    """None where a config.json does not tell what a cache holds."""
    if facts.cached_numbers is None or facts.hidden_size is None:
        return None
    return ModelSize(
        facts.weights, facts.hidden_size, facts.layers, facts.vocab_size, facts.cached_numbers, facts.vision
    )


def plan_memory(
    config: Config,
    chosen: EngineChoice,
    gpu: Gpu,
    size: ModelSize,
    length: int,
    training: Training | None,
    *,
    shared: bool,
    apart: bool = False,
) -> MemoryPlan:
    """Share out a GPU's memory. `length` is the longest sequence, `training` None where nothing is learned there,
    `apart` a learner in a process of its own.

    What does not fit however it is shared out is a ConfigError that says what would help.
    """
    fixed = _Fixed.of(config, chosen, size, training, shared)
    features = KEPT_FEATURES * fixed.copies if size.vision else 0
    room = int(gpu.memory * config.engine.memory_fraction) - OVERHEAD - features - fixed.bytes
    room -= OVERHEAD + fixed.writers if apart else 0
    per_token = size.cached * itemsize_of(chosen.precision) if chosen.on_gpu else 0
    least = per_token * _paged(length)
    most = chosen.episodes * least
    # Few conversations grow as long as they may: half of the room is a good cache, whatever max_batch would fill.
    wanted = max(least, min(chosen.max_batch * least, room // 2))
    plan = MemoryPlan(
        gpu, config.engine.memory_fraction, fixed.weights, fixed.copies, fixed.optimizer, fixed.others,
        learning=0, cache=0, cached_tokens=0, token_budget=config.learner.token_budget or TOKEN_BUDGET,
        recompute=bool(config.learner.gradient_checkpointing), takes_turns=False,
        vision=fixed.weights * size.vision // size.weights, writers=fixed.writers, apart=apart,
        handover=fixed.writers if apart else 0,
    )  # fmt: skip

    def with_cache(plan: MemoryPlan, room: int) -> MemoryPlan:
        cache = max(0, min(room, most))
        return replace(plan, cache=cache, cached_tokens=cache // per_token if per_token else 0)

    if training is None:
        if room < least:
            raise _does_not_fit(plan, room - least, "rollout.max_tokens (shorter sequences), engine=torch (the CPU)")
        return with_cache(plan, room)
    passes = [replace(plan, token_budget=t, recompute=r, learning=fixed.learning(size, t, r)) for t, r in _ways(config)]
    sleeps, lag = config.engine.sleep, config.training.max_lag
    side_by_side = [candidate for candidate in passes if candidate.learning + wanted <= room]
    if side_by_side and (sleeps is not True or not chosen.on_gpu):  # who is elsewhere has nothing here to give back
        return with_cache(side_by_side[0], room - side_by_side[0].learning)
    fitting = [candidate for candidate in passes if candidate.learning <= room]
    if lag == 0 and sleeps is not False and chosen.on_gpu and not apart and fitting and room >= least:
        return replace(with_cache(fitting[0], room), takes_turns=True)
    tight = [candidate for candidate in passes if candidate.learning + least <= room]
    if sleeps is not True and tight:  # a smaller cache than wanted: fewer sequences are decoded together
        return with_cache(tight[-1], room - tight[-1].learning)
    both_at_once = lag > 0 or sleeps is False or apart
    short = room - (passes[-1].learning + least if both_at_once else max(passes[-1].learning, least))
    helps = "learner.offload=optimizer, learner.optimizer=adamw8bit, learner.lora_rank=16"
    raise _does_not_fit(plan, short, f"{helps}, learner.place=here" if apart else helps)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What is there all the time, and what is trained."""

    weights: int
    copies: int
    optimizer: int
    others: int
    trained: int
    """Numbers that have a gradient."""
    itemsize: int
    """Of what the learner computes with: below an adapter, and where float32 is asked for, float32 weights."""

    writers: int = 0
    """Of the weights: those of a sampler that has its own."""

    @property
    def bytes(self) -> int:
        return self.weights + self.optimizer + self.others

    @classmethod
    def of(
        cls, config: Config, chosen: EngineChoice, size: ModelSize, training: Training | None, shared: bool
    ) -> "_Fixed":
        learner, writing = config.learner, itemsize_of(chosen.precision)
        if training is None:
            return cls(size.weights * writing, 1, 0, 0, 0, writing, size.weights * writing)
        narrow = (learner.precision or Precision.bfloat16) is Precision.bfloat16 and not learner.lora_rank
        itemsize = 2 if narrow else 4
        trained = size.trained(learner)
        moments = 2 if learner.optimizer is OptimizerName.adamw8bit else 8
        per_weight = (4 if narrow else 0) + moments  # float32 weights are their own masters
        own = training.critic and not learner.shared_critic
        critic = size.weights * itemsize + size.trainable(learner) * per_weight if own else 0
        reference = size.weights * itemsize if training.reference and not learner.lora_rank else 0
        sampler = writing if chosen.on_gpu and not shared else 0
        return cls(
            weights=size.weights * (itemsize + sampler),
            copies=2 if sampler else 1,
            optimizer=0 if learner.offload is Offload.optimizer else trained * per_weight,
            others=critic + reference,
            trained=trained,
            itemsize=itemsize,
            writers=size.weights * sampler,
        )

    def learning(self, size: ModelSize, tokens: int, recompute: bool) -> int:
        """Bytes of gradients, activations and logits with passes of so many tokens."""
        activations = size.activations(tokens, self.itemsize, recompute=recompute)
        gradients = self.trained * (6 if self.itemsize == 2 else 4)  # of a pass, and their sum in float32
        return gradients + activations + size.scores()


def itemsize_of(precision: Precision) -> int:
    """Bytes of one number."""
    return 2 if precision is Precision.bfloat16 else 4


def _ways(config: Config) -> Iterator[tuple[int, bool]]:
    """(tokens of a pass, whether activations are computed twice), the fastest first."""
    budget, checkpointing = config.learner.token_budget, config.learner.gradient_checkpointing
    for recompute in (False, True) if checkpointing is None else (checkpointing,):
        tokens = budget or LARGEST_BUDGET
        least = budget or (LEAST_BUDGET if recompute else TOKEN_BUDGET)
        while tokens >= least:
            yield tokens, recompute
            tokens //= 2


def _paged(length: int) -> int:
    return -(-length // PAGE) * PAGE


def _does_not_fit(plan: MemoryPlan, short: int, advice: str) -> ConfigError:
    allowed = f"engine.memory_fraction={plan.fraction:g} of it"
    return ConfigError(
        f"the model does not fit: {plan.gpu}, {allowed}: {_gib(-short)} are missing; what helps: {advice}, or a "
        "larger engine.memory_fraction"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def in_words(size: int) -> str:
    """Bytes as a person reads them."""
    return _gib(size) if size >= 2**29 else f"{size / 2**20:.1f} MiB"

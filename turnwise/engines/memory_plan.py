"""Who gets how much of a GPU's memory: weights, optimizer, activations, cache; and whether they must take turns."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from turnwise.choices import Offload, OptimizerName, Precision
from turnwise.config import Config
from turnwise.engines.devices import TOKEN_BUDGET, Chosen, Gpu
from turnwise.errors import ConfigError

OVERHEAD = 2 * 2**30
"""What CUDA itself, cuBLAS, the graphs and the gaps between blocks take."""
SCORED_ROWS = 1024
"""Rows of logits that are there at once, in float32, with their gradient and one more."""
LARGEST_BUDGET, LEAST_BUDGET = 32_768, 1024
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

    @property
    def _width(self) -> float:
        """Outputs of a layer's products for one token: their weights divided by the hidden size."""
        inside = max(self.weights - self.vocabulary * self.hidden, 0)
        return inside / (self.layers * self.hidden)

    def activations(self, tokens: int, itemsize: int, *, recompute: bool) -> int:
        """Bytes that a pass over so many tokens keeps for its backward."""
        one_layer = 5 * self.hidden + 1.25 * self._width
        numbers = self.layers * self.hidden + one_layer if recompute else self.layers * one_layer
        return int(1.1 * tokens * numbers * itemsize)

    def scores(self) -> int:
        """Bytes of the logits that are there at once."""
        return 3 * 4 * SCORED_ROWS * self.vocabulary

    def adapter(self, rank: int) -> int:
        """About the numbers of LoRA's factors."""
        return int(rank * self.layers * (6 * self.hidden + self._width))


@dataclass(frozen=True, slots=True)
class Training:
    """What a learner has beside the policy, where one is on the same GPU."""

    critic: bool = False
    reference: bool = False


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

    @property
    def usable(self) -> int:
        return int(self.gpu.memory * self.fraction)

    def lines(self) -> Iterator[str]:
        """The plan as a small table."""
        how = "shared by sampler and learner" if self.copies == 1 else f"{self.copies} copies"
        yield f"{self.gpu}, of which {_gib(self.usable)} may be used (engine.memory_fraction={self.fraction:g})"
        yield f"  weights      {_gib(self.weights)}, {how}"
        if self.optimizer or self.learning:
            yield f"  optimizer    {_gib(self.optimizer)}"
        if self.others:
            yield f"  others       {_gib(self.others)}, reference and critic"
        if self.learning:
            kept = "activations computed twice" if self.recompute else "activations kept"
            yield f"  activations  {_gib(self.learning)} at most, passes of {self.token_budget:,} tokens, {kept}"
        turns = ", given back while the learner learns" if self.takes_turns else ""
        yield f"  cache        {_gib(self.cache)}, {self.cached_tokens:,} tokens{turns}"

    def as_json(self) -> dict[str, float | int | bool | str]:
        """Plain values."""
        return {
            "gpu": self.gpu.name, "memory": self.gpu.memory, "usable": self.usable, "weights": self.weights,
            "optimizer": self.optimizer, "others": self.others, "learning": self.learning, "cache": self.cache,
            "cached_tokens": self.cached_tokens, "token_budget": self.token_budget, "recompute": self.recompute,
            "takes_turns": self.takes_turns,
        }  # fmt: skip


def plan_memory(
    config: Config, chosen: Chosen, gpu: Gpu, size: ModelSize, length: int, training: Training | None, *, shared: bool
) -> MemoryPlan:
    """Share out a GPU's memory. `length` is the longest sequence, `training` None where nothing is learned there.

    What does not fit however it is shared out is a ConfigError that says what would help.
    """
    narrow = 2 if chosen.precision is Precision.bfloat16 else 4
    fixed = _Fixed.of(config, size, training, narrow, samples=chosen.on_gpu, shared=shared)
    room = int(gpu.memory * config.engine.memory_fraction) - OVERHEAD - fixed.bytes
    per_token = size.cached * narrow if chosen.on_gpu else 0
    least = per_token * _paged(length)
    wanted, most = chosen.max_batch * least, chosen.episodes * least
    plan = MemoryPlan(
        gpu, config.engine.memory_fraction, fixed.weights, fixed.copies, fixed.optimizer, fixed.others,
        learning=0, cache=0, cached_tokens=0, token_budget=config.learner.token_budget or TOKEN_BUDGET,
        recompute=bool(config.learner.gradient_checkpointing), takes_turns=False,
    )  # fmt: skip

    def with_cache(plan: MemoryPlan, room: int) -> MemoryPlan:
        cache = max(0, min(room, most))
        return replace(plan, cache=cache, cached_tokens=cache // per_token if per_token else 0)

    if training is None:
        if room < least:
            raise _does_not_fit(gpu, room - least, "a smaller engine.max_batch does not help: one sequence is too long")
        return with_cache(plan, room)
    passes = [replace(plan, token_budget=t, recompute=r, learning=fixed.learning(size, t, r)) for t, r in _ways(config)]
    sleeps, lag = config.engine.sleep, config.training.max_lag
    side_by_side = [one for one in passes if one.learning + wanted <= room]
    if sleeps is not True and side_by_side:
        return with_cache(side_by_side[0], room - side_by_side[0].learning)
    fitting = [one for one in passes if one.learning <= room]
    if lag == 0 and sleeps is not False and chosen.on_gpu and fitting and room >= least:
        return replace(with_cache(fitting[0], room), takes_turns=True)
    tight = [one for one in passes if one.learning + least <= room]
    if sleeps is not True and tight:  # a smaller cache than wanted: fewer sequences are decoded together
        return with_cache(tight[-1], room - tight[-1].learning)
    short = room - passes[-1].learning - (0 if lag == 0 else least)
    raise _does_not_fit(gpu, short, "learner.offload=optimizer, learner.optimizer=adamw8bit, learner.lora_rank=16")


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

    @property
    def bytes(self) -> int:
        return self.weights + self.optimizer + self.others

    @classmethod
    def of(
        cls, config: Config, size: ModelSize, training: Training | None, narrow: int, *, samples: bool, shared: bool
    ) -> "_Fixed":
        learner = config.learner
        if training is None:
            return cls(size.weights * narrow, 1, 0, 0, 0, narrow)
        trained = size.adapter(learner.lora_rank) if learner.lora_rank else size.weights
        moments = 2 if learner.optimizer is OptimizerName.adamw8bit else 8
        state = 0 if learner.offload is Offload.optimizer else trained * (4 + moments)
        own = training.critic and not learner.shared_critic
        critic = size.weights * (narrow + 4 + moments) if own else 0
        reference = size.weights * narrow if training.reference and not learner.lora_rank else 0
        copies = 2 if samples and not shared else 1
        return cls(copies * size.weights * narrow, copies, state, critic + reference, trained, narrow)

    def learning(self, size: ModelSize, tokens: int, recompute: bool) -> int:
        """Bytes of gradients, activations and logits with passes of so many tokens."""
        kept = size.activations(tokens, self.itemsize, recompute=recompute)
        return self.trained * self.itemsize + kept + size.scores()


def _ways(config: Config) -> Iterator[tuple[int, bool]]:
    """(tokens of a pass, whether activations are computed twice), the fastest first."""
    given, asked = config.learner.token_budget, config.learner.gradient_checkpointing
    for recompute in (False, True) if asked is None else (asked,):
        tokens = given or LARGEST_BUDGET
        least = given or (LEAST_BUDGET if recompute else TOKEN_BUDGET)
        while tokens >= least:
            yield tokens, recompute
            tokens //= 2


def _paged(length: int) -> int:
    return -(-length // PAGE) * PAGE


def _does_not_fit(gpu: Gpu, short: int, advice: str) -> ConfigError:
    return ConfigError(f"the model does not fit: {gpu} lacks {_gib(-short)} for it; what helps: {advice}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

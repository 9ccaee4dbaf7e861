"""How many tokens a pass with gradient may have on a GPU, and how many layers it computes twice, by measured memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from turnwise.config import LearnerConfig
from turnwise.engines.devices import TOKEN_BUDGET
from turnwise.engines.memory_plan import LARGEST_BUDGET
from turnwise.engines.model.policy_model import PolicyModel

WANTED_TOKENS = 16_384
"""Fewer leave a GPU idle between kernels: layers are computed twice before a pass gets smaller than this."""
STEP = 1024
"""Budgets are whole multiples, so that a few bytes more or less change nothing."""
SHARE = 0.9
"""Of the free memory; the rest is lost between blocks of the allocator."""
LOGIT_BYTES = 1_610_612_736
"""Float32 logits that are made at once: 8,192 rows of 49,152."""
MOST_ROWS, FEWEST_ROWS = 16_384, 128
BESIDE_PRODUCTS = 1.25
"""Activations kept for backward over the numbers that enter and leave matrix products."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes that one token of a pass with gradient keeps until backward."""

    layers: int
    kept: float
    """In each layer."""
    entering: float
    """In a layer that is computed again: what enters it."""
    outside: float
    """Before the first and behind the last layer."""

    def per_token(self, recompute: int) -> float:
        """When the first `recompute` layers are computed again, one of them at a time."""
        again = min(recompute, self.layers)
        recomputed = self.kept if again else 0.0
        return self.outside + (self.layers - again) * self.kept + again * self.entering + recomputed


def estimate(model: PolicyModel) -> PassMemory:
    """From the shapes of a model's matrices: what enters and leaves each is kept. No token goes through a tower."""
    numbers, ends, tower = 0, model.shape.vocab_size, {parameter for _, parameter in model.vision_parameters()}
    for parameter in (parameter for parameter in model.parameters() if parameter not in tower):
        if parameter.dim() > 1 and parameter.shape[0] != ends:  # embedding and head are the token scores' affair
            numbers += parameter.shape[-1] + parameter.shape[-2]
    layers, size = max(1, len(model.shape.caches)), max(p.dtype.itemsize for p in model.parameters())
    hidden = model.shape.hidden_size * size
    return PassMemory(layers, BESIDE_PRODUCTS * size * numbers / layers, hidden, 6 * hidden)


def choose(memory: PassMemory, room: float, recompute: int | None) -> tuple[int, int]:
    """Tokens of a pass in so many bytes, and layers to compute again: the fewest that give WANTED_TOKENS, or those
    asked for."""
    counts = range(memory.layers + 1) if recompute is None else (recompute,)
    tokens, layers = 0, 0
    for layers in counts:
        tokens = int(room / memory.per_token(layers))
        if tokens >= WANTED_TOKENS:
            break
    return min(LARGEST_BUDGET, max(STEP, tokens // STEP * STEP)), layers


def logit_rows(vocab_size: int, room: int) -> int:
    """For how many tokens logits are made at once where so many bytes are free."""
    return max(FEWEST_ROWS, min(MOST_ROWS, min(LOGIT_BYTES, room // 16) // (4 * vocab_size)))


def free_bytes(device: torch.device) -> int:
    """Of a GPU: what nobody has, and what PyTorch holds without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class ActivationMemory:
    """What a learner knows of its passes: an estimate that the first passes correct, and limits that were run into.

    `logit_bytes` are those of the logits made at once. `memory_bytes` is what gradients, activations and logits may
    take together; None takes what is free on the device, less what the optimizer has yet to allocate.
    """

    def __init__(
        self,
        models: list[PolicyModel],
        config: LearnerConfig,
        device: torch.device,
        *,
        gradients: int,
        moments_to_come: Callable[[], int],
        logit_bytes: int,
        memory_bytes: int | None,
    ) -> None:
        self._device, self._memory_bytes = device, memory_bytes
        self._gradients, self._moments_to_come, self._logits = gradients, moments_to_come, 2 * logit_bytes
        self._asked = config.token_budget
        parts = [estimate(model) for model in models]
        self._first = PassMemory(
            parts[0].layers,
            sum(part.kept for part in parts),
            sum(part.entering for part in parts),
            sum(part.outside for part in parts),
        )
        self._scale = 1.0
        """What was measured over what was estimated."""
        self._limit: int | None = None
        """Lower than a number of tokens that did not fit."""
        self._most_tokens, self._recomputed = 0, -1
        """Of the last pass that was measured."""
        chosen = config.gradient_checkpointing
        self._free_choice = chosen is None and device.type == "cuda" and all(model.recomputes for model in models)
        self.recompute = self._first.layers if chosen else 0
        """Layers that are computed again in backward."""

    @property
    def token_budget(self) -> int:
        """Tokens of the next passes; on a GPU also decides how many layers are computed again."""
        if self._device.type != "cuda":
            tokens = self._asked or TOKEN_BUDGET
        elif self._asked is not None:
            tokens = self._asked
        else:
            tokens, layers = choose(self._scaled(), self._room(), None if self._free_choice else self.recompute)
            self.recompute = max(self.recompute, layers) if self._limit is not None else layers
        return tokens if self._limit is None else min(tokens, self._limit)

    def layers_again(self, tokens: int) -> int:
        """Layers that a pass of so many tokens computes again. Where the number of tokens is asked for and this is not,
        as few as leave room for them; else `token_budget` has decided."""
        if self._free_choice and self._asked is not None and self._limit is None:
            memory, room, all_of_them = self._scaled(), self._room(), self._first.layers
            fitting = (count for count in range(all_of_them) if tokens * memory.per_token(count) <= room)
            self.recompute = next(fitting, all_of_them)
        return self.recompute

    def _scaled(self) -> PassMemory:
        first = self._first
        return PassMemory(
            first.layers, first.kept * self._scale, first.entering * self._scale, first.outside * self._scale
        )

    def _room(self) -> float:
        free = self._memory_bytes
        if free is None:
            free = free_bytes(self._device) - self._moments_to_come()
        return max(0.0, SHARE * free - self._gradients - self._logits)

    @contextmanager
    def measured(self, tokens: int) -> Iterator[None]:
        """Around a pass with gradient. Only one that needed more than any before it can be told from the others, so no
        other is looked at: asking the allocator takes the host a millisecond."""
        if self._device.type != "cuda" or (tokens <= self._most_tokens and self.recompute == self._recomputed):
            yield
            return
        self._most_tokens, self._recomputed = tokens, self.recompute
        before, most = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        yield
        now = torch.cuda.max_memory_allocated(self._device)
        if now > most and tokens >= STEP:
            activations = now - before - self._logits
            expected = tokens * self._first.per_token(self.recompute)
            self._scale = min(4.0, max(0.5, activations / expected))

    def exceeded_by(self, tokens: int) -> bool:
        """Whether a pass of so many tokens is more than what is known not to fit allows."""
        return self._limit is not None and tokens > self._limit

    def shrink(self, tokens: int) -> int:
        """After a pass of so many tokens did not fit: what later ones may have at most."""
        lower = max(1, tokens // 2)
        self._limit = lower if self._limit is None else min(self._limit, lower)
        return self._limit

    def recompute_all(self) -> bool:
        """Compute every layer again from now on; False where that is so already, or was ruled out."""
        if not self._free_choice or self.recompute >= self._first.layers:
            return False
        self.recompute = self._first.layers
        self._free_choice = False
        return True

"""How many CPU threads to use and in which regime: measured, and proven to round the same whatever is batched."""

import os
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from turnwise.engines.model.attention import Regime
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.samplers.cpu.exactness import REGIMES, find_regime
from turnwise.engines.samplers.cpu.steps import decode
from turnwise.engines.samplers.kv_cache import ActiveRows
from turnwise.errors import EngineError

UNPADDED = Regime(row_pad=1, query_rows=1, key_block=1 << 20)
"""Products in the shapes they come in: the fastest, and promises nothing."""
MEASURE_SECONDS = 0.15
MEASURE_ROWS, MEASURE_LENGTH = 16, 256


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """The thread count and the regime to use, what a decode step took with each count, and whether sums are
    reproducible.

    `invariant` means: a token's logprob has the same bits alone or in a batch, with or without a cached prefix.
    """

    threads: int
    regime: Regime
    seconds_per_step: dict[int, float]
    invariant: bool
    unproven: str | None = None
    """Why no proof was looked for; None where one was."""

    @property
    def proven(self) -> Regime | None:
        """The regime, where it is more than the cheapest one."""
        return self.regime if self.invariant else None

    def promise(self) -> str:
        """What a user may rely on, as the end of a sentence."""
        if self.invariant:
            return "a conversation's tokens do not depend on the rest of the batch (proven bit by bit on this machine)"
        why = self.unproven or "rounding on this machine depends on the batch (no exact method was found)"
        return f"{why}, so the same seed can write other tokens when episodes run in another order"


def check_cacheable(model: PolicyModel) -> None:
    """Refuse a model that cannot be continued from keys and values in one pass with others, by what is in its way."""
    reason = model.shape.no_caching or model.shape.no_packing
    if reason is not None:
        raise EngineError(f"the torch sampler cannot write with this model: {reason}")


def choose_threads(model: PolicyModel, wanted: int, *, batch_invariant: bool = True) -> ThreadChoice:
    """The fastest thread count with a regime that rounds reproducibly, else the fastest; `wanted` above 0 leaves no
    choice of the count. Where no proof is asked for or to be had, nothing is padded."""
    check_cacheable(model)
    unproven = None if batch_invariant else "engine.batch_invariant=false"
    if not isinstance(model, Decoder):
        unproven = "batch invariance is proven for the native implementation only"
    before = torch.get_num_threads()
    candidates = [wanted] if wanted > 0 else sorted({1, usable_cores()})
    seconds: dict[int, float] = {}
    try:
        for count in candidates:
            torch.set_num_threads(count)
            seconds[count] = _seconds_per_step(model, UNPADDED if unproven else REGIMES[0])
        by_speed = sorted(candidates, key=lambda count: seconds[count])
        if unproven is not None or not isinstance(model, Decoder):
            return ThreadChoice(by_speed[0], UNPADDED, seconds, invariant=False, unproven=unproven)
        for count in by_speed:
            torch.set_num_threads(count)
            regime = find_regime(model)
            if regime is not None:
                return ThreadChoice(count, regime, seconds, invariant=True)
        return ThreadChoice(by_speed[0], REGIMES[0], seconds, invariant=False)
    finally:
        torch.set_num_threads(before)


def usable_cores() -> int:
    """The cores this process may run on, where the system tells; else all of them."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@torch.inference_mode()
def _seconds_per_step(model: PolicyModel, regime: Regime) -> float:
    """The mean over a short while: on a busy machine the stalls of waiting threads belong to the price."""
    length = min(MEASURE_LENGTH, model.shape.context_length)
    rows = ActiveRows.of(model, MEASURE_ROWS)
    rows.reserve(MEASURE_ROWS, length)
    tokens = np.zeros(MEASURE_ROWS, dtype=np.int64)
    places = np.full(MEASURE_ROWS, length - 1, dtype=np.int64)
    decode(model, rows, tokens, places, regime)  # the first call allocates
    steps, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < MEASURE_SECONDS or steps == 0:
        decode(model, rows, tokens, places, regime)
        steps += 1
    return passed / steps

"""The torch sampler: continuous batching on the CPU, or wherever its model lies, behind the asyncio front."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from turnwise.engines.model.attention import Regime
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.samplers.cpu.batching import Batcher
from turnwise.engines.samplers.cpu.threads import check_cacheable
from turnwise.engines.samplers.in_process import InProcessSampler
from turnwise.errors import EngineError

SESSION_CACHE_BYTES = 2 << 30
PREFIX_BYTES = 512 << 20


class TorchSampler(InProcessSampler):
    """Writes with any PolicyModel whose keys and values can be kept."""

    def __init__(
        self,
        model: PolicyModel,
        *,
        decode: Callable[[Sequence[int]], str],
        max_batch: int,
        threads: int,
        regime: Regime,
        policy_version: int = 0,
        session_budget: int = SESSION_CACHE_BYTES,
        prefix_budget: int = PREFIX_BYTES,
    ) -> None:
        """`decode` turns token ids into text, for stop strings; `threads.choose_threads` knows thread count and regime;
        the budgets are bytes of cached and shared caches."""
        if max_batch < 1 or threads < 1:
            raise EngineError(f"max_batch and threads must be positive, found {max_batch} and {threads}")
        check_cacheable(model)

        @contextmanager
        def on_worker() -> Iterator[None]:
            torch.set_num_threads(threads)
            yield

        batcher = Batcher(model, decode, regime, max_batch, session_budget, prefix_budget)
        super().__init__(batcher, model, name="torch sampler", on_worker=on_worker, policy_version=policy_version)
        self.capabilities = replace(self.capabilities, routes=bool(model.shape.routers))

"""The sampler of a GPU in this process: paged keys and values, several tokens per round trip, all in CUDA graphs."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from turnwise.engines.device_clock import DeviceClock
from turnwise.engines.kernels.paged_attention import invariant_size
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.fused_decoder import FusedDecoder
from turnwise.engines.model.policy_model import PolicyModel, state_bytes
from turnwise.engines.samplers.gpu.batching import DeviceBatcher
from turnwise.engines.samplers.gpu.pass_shapes import SMALLEST_PASS
from turnwise.engines.samplers.gpu.state_rows import StateRows
from turnwise.engines.samplers.gpu.steps import DeviceSteps, page_bytes
from turnwise.engines.samplers.in_process import InProcessSampler
from turnwise.errors import EngineError

LOG = logging.getLogger(__name__)
STEPS_PER_RUN = 8
PREFILL_TOKENS = 8192
QUERY_BLOCK = 16
MOST_KEPT = 4
"""Sequences whose states are kept beside those that are written, for each of these."""
SWITCH_SECONDS = 5e-5
"""How long the worker waits at most for the interpreter after each call into CUDA and each large array operation;
Python's own 5 ms would be more than a step takes, and a run has dozens of them."""


class CudaSampler(InProcessSampler):
    """Writes with any PolicyModel whose keys and values can be kept; native ones by fused kernels.

    On `device="cpu"` it does the same with the kernels' references, for tests.
    """

    def __init__(
        self,
        model: PolicyModel,
        *,
        device: torch.device,
        decode: Callable[[Sequence[int]], str],
        max_batch: int,
        cache_bytes: int,
        policy_version: int = 0,
        invariant: bool,
        clock: DeviceClock | None = None,
        say: Callable[[str], None] = LOG.warning,
        steps_per_run: int = STEPS_PER_RUN,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        """`decode` turns token ids into text, for stop strings; `say` tells the user what had to be given up;
        `invariant`: a token's bits do not depend on what else is computed (native models only)."""
        if max_batch < 1 or steps_per_run < 1 or prefill_tokens < 1:
            values = f"{max_batch}, {steps_per_run} and {prefill_tokens}"
            raise EngineError(f"max_batch, steps_per_run and prefill_tokens must be positive, found {values}")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        reason = model.shape.no_caching or model.shape.no_packing
        if reason is not None:
            raise EngineError(f"the cuda sampler cannot write with this model: {reason}")
        block = QUERY_BLOCK
        if isinstance(model, Decoder):
            if not isinstance(model, FusedDecoder) or model.invariant != invariant:
                model = FusedDecoder.of(model, device=device, dtype=model.dtype, invariant=invariant)
            if invariant:
                block = min(block, invariant_size(model.config.num_heads, model.config.num_kv_heads))
        elif invariant:
            raise EngineError("batch invariance on a GPU is for the native implementation only")
        states = _state_rows(model, max_batch, cache_bytes)
        steps = DeviceSteps(
            model,
            device,
            slots=max_batch,
            steps=steps_per_run,
            block=block,
            invariant=invariant,
            smallest_pass=min(SMALLEST_PASS, prefill_tokens),
            clock=clock,
            say=say,
            state_rows=states,
        )
        room = cache_bytes - (0 if states is None else states.rows * state_bytes(model.shape.states))
        # Pages of a model without attention take no memory, and are only counted.
        size = page_bytes(model.shape.caches, steps.dtype)
        pages = room // size if size else MOST_KEPT * max_batch * steps.max_pages
        batcher = DeviceBatcher(
            model, decode, steps, slots=max_batch, pages=pages, prefill_tokens=prefill_tokens, say=say
        )

        def on_worker() -> AbstractContextManager[None]:
            return _own_stream(device, steps, prefill_tokens, say) if device.type == "cuda" else nullcontext()

        super().__init__(batcher, model, name="cuda sampler", on_worker=on_worker, policy_version=policy_version)


def _state_rows(model: PolicyModel, slots: int, cache_bytes: int) -> StateRows | None:
    """Rows for the slots, and others for what is kept, in at most half of the cache's memory."""
    each = state_bytes(model.shape.states)
    if not each:
        return None
    kept = min(MOST_KEPT * slots, cache_bytes // 2 // each - slots - 2)
    if kept < 1:
        raise EngineError(
            f"the states of recurrent layers take {each / 2**20:.1f} MiB for each of {slots} turns, half of the "
            f"cache has {cache_bytes / 2**21:.1f} MiB: lower rollout.concurrency or raise engine.memory_fraction"
        )
    return StateRows(slots, kept)


@contextmanager
def _own_stream(
    device: torch.device, steps: DeviceSteps, prefill_tokens: int, say: Callable[[str], None]
) -> Iterator[None]:
    """A stream of the worker's own, which a learner's long kernels do not hold up, with everything captured on it."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        _warm_up(steps, prefill_tokens, say)
        yield


def _warm_up(steps: DeviceSteps, prefill_tokens: int, say: Callable[[str], None]) -> None:
    start = time.perf_counter()
    try:
        with torch.inference_mode():
            count = steps.warm_up(prefill_tokens)
    except torch.OutOfMemoryError:  # the batcher makes batches smaller when it meets this itself
        steps.shrink()
        say("not enough memory to try its largest batches (engine.memory_fraction says how much to take)")
        return
    torch.cuda.current_stream().synchronize()
    steps.shrink()  # what the first runs took beside the graphs' own memory, on a stream that no learner shares
    LOG.info("%d shapes of passes compiled and captured in %.1f s", count, time.perf_counter() - start)

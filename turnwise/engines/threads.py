"""How many CPU threads to use: measured, and proven to round the same whatever is batched together."""

import os
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.attention import Chunk, exact
from turnwise.engines.decoder import Decoder
from turnwise.engines.kv_cache import ActiveRows
from turnwise.engines.steps import decode, pad_rows, prefill

MEASURE_SECONDS = 0.15
MEASURE_ROWS, MEASURE_LENGTH = 16, 256


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """The thread count to use, what a decode step took with each candidate, and whether sums are reproducible.

    `invariant` means: a token's logprob has the same bits alone or in a batch, with or without a cached prefix.
    """

    threads: int
    seconds_per_step: dict[int, float]
    invariant: bool


def choose_threads(decoder: Decoder, wanted: int) -> ThreadChoice:
    """The fastest thread count that rounds reproducibly, else the fastest; `wanted` above 0 leaves no choice."""
    before = torch.get_num_threads()
    candidates = [wanted] if wanted > 0 else sorted({1, usable_cores()})
    seconds: dict[int, float] = {}
    try:
        for count in candidates:
            torch.set_num_threads(count)
            seconds[count] = _seconds_per_step(decoder)
        by_speed = sorted(candidates, key=lambda count: seconds[count])
        for count in by_speed:
            torch.set_num_threads(count)
            if prove_row_invariance(decoder):
                return ThreadChoice(count, seconds, invariant=True)
        return ThreadChoice(by_speed[0], seconds, invariant=False)
    finally:
        torch.set_num_threads(before)


def usable_cores() -> int:
    """The cores this process may run on, where the system tells; else all of them."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@torch.inference_mode()
def _seconds_per_step(decoder: Decoder) -> float:
    """The mean over a short while: on a busy machine the stalls of waiting threads belong to the price."""
    length = min(MEASURE_LENGTH, decoder.config.context_length)
    rows = ActiveRows(decoder.config, decoder.dtype, MEASURE_ROWS)
    rows.reserve(MEASURE_ROWS, length)
    tokens = np.zeros(MEASURE_ROWS, dtype=np.int64)
    places = np.full(MEASURE_ROWS, length - 1, dtype=np.int64)
    decode(decoder, rows, tokens, places)  # the first call allocates
    steps, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < MEASURE_SECONDS or steps == 0:
        decode(decoder, rows, tokens, places)
        steps += 1
    return passed / steps


@torch.inference_mode()
def prove_row_invariance(decoder: Decoder) -> bool:
    """Check with this decoder's shapes and the current thread count that no row's bits depend on its company.

    One whole-sequence pass is the reference; prompts fed in pieces and tokens decoded in batches of several sizes
    must reproduce it, and so must long caches under more or less padding. A proof for what was tried, at the sizes
    where arithmetic libraries are known to change their ways; not a theorem.
    """
    config = replace(decoder.config, num_layers=1)  # all matrix shapes at a fraction of the work
    tensors = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    small = type(decoder)(config, tensors)
    noise = torch.Generator().manual_seed(0)
    return _pieces_equal_whole(small, noise) and _padding_is_invisible(small, noise)


def _pieces_equal_whole(decoder: Decoder, noise: torch.Generator) -> bool:
    length = min(150, decoder.config.context_length)
    ids = torch.randint(0, decoder.config.vocab_size, (length,), generator=noise)
    whole = decoder.logits(decoder(pad_rows(ids), pad_rows(torch.arange(length)), exact([length])))
    tokens: NDArray[np.int64] = ids.numpy()
    for count in (1, 3, 17, 40):
        rows = ActiveRows(decoder.config, decoder.dtype, count)
        rows.reserve(count, length)
        ends = [2 + 37 * row % (length - 4) for row in range(count)]
        for pieces in ([Chunk(row, 0, ends[row] // 2) for row in range(count)],
                       [Chunk(row, ends[row] // 2, ends[row]) for row in range(count)]):  # fmt: skip
            logits = prefill(decoder, rows, pieces, [tokens[piece.start : piece.end] for piece in pieces])
            if not torch.equal(logits, whole[[piece.end - 1 for piece in pieces]]):
                return False
        for shift in range(2):
            places = np.array(ends, dtype=np.int64) + shift
            if not torch.equal(decode(decoder, rows, tokens[places], places), whole[places.tolist()]):
                return False
    return True


def _padding_is_invisible(decoder: Decoder, noise: torch.Generator) -> bool:
    """A long cache alone, beside longer ones, and as a prefill of one token."""
    short = min(700, decoder.config.context_length // 2)
    longest = min(1300, decoder.config.context_length - 1)

    def filled(count: int) -> ActiveRows:
        rows = ActiveRows(decoder.config, decoder.dtype, count)
        rows.reserve(count, longest + 1)
        for tensor in (rows.keys, rows.values):
            tensor.copy_(_noise_like(tensor, noise.manual_seed(1)))
        return rows

    alone, beside = filled(1), filled(5)
    beside.write(0, 0, alone.read(0, 0, short))
    token, place = np.array([1 % decoder.config.vocab_size]), np.array([short])
    reference = decode(decoder, alone, token, place)
    among = decode(decoder, beside, token.repeat(5), np.linspace(short, longest, 5).astype(np.int64))
    again = prefill(decoder, alone, [Chunk(0, short, short + 1)], [token])
    return torch.equal(reference[0], among[0]) and torch.equal(reference, again)


def _noise_like(tensor: Tensor, noise: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=noise).to(tensor.dtype)

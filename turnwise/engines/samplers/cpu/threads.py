"""How many CPU threads to use and in which regime: measured, and proven to round the same whatever is batched."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.model.attention import Chunk, Regime, cached_decode, cached_prefill, exact, pad_rows, padded
from turnwise.engines.model.batch_invariant import CUT
from turnwise.engines.model.decoder import PLAIN, Decoder, Layer, rms_norm, rotate
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.policy_model import LayerCache, ModelInputs, PolicyModel
from turnwise.engines.samplers.cpu.steps import decode, prefill
from turnwise.engines.samplers.kv_cache import ActiveRows
from turnwise.engines.samplers.request import SamplingParams
from turnwise.engines.samplers.sampling import Rules, choose
from turnwise.errors import EngineError

UNPADDED = Regime(row_pad=1, query_rows=1, key_block=1 << 20)
"""Products in the shapes they come in: the fastest, and promises nothing."""
MEASURE_SECONDS = 0.15
MEASURE_ROWS, MEASURE_LENGTH = 16, 256
REGIMES = (
    Regime(16, 2, 256),
    Regime(16, 4, 256),
    Regime(16, 4, 128),
    Regime(16, 16, 128),
    Regime(16, 16, 32),
    Regime(64, 16, 128),
    Regime(64, 64, 32),
)
"""Cheapest first. The last sums values in blocks that are never cut short, so that only counts of rows can matter."""

PIECES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 101)
"""Lengths in which a prompt is fed: around the widths of vectors and of the tiles of a BLAS."""
BATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24)
SEQUENCE, LONG, LONGEST = 660, 1300, 4095
MOST_ROWS = 2048
"""Most rows of one trial."""
MULTIPLICATIONS = 2_000_000_000
"""Most of one trial, so that a large model is tried with fewer rows instead of for minutes."""


def find_regime(decoder: Decoder) -> Regime | None:
    """The cheapest regime that `holds` with the current thread count; None where none does."""
    return next((regime for regime in REGIMES if holds(decoder, regime)), None)


@torch.inference_mode()
def holds(decoder: Decoder, regime: Regime) -> bool:
    """Whether, with this decoder's shapes and the current thread count, no row's bits depend on its company.

    A proof for what was tried, at the sizes where arithmetic libraries are known to change their ways; not a theorem.
    """
    config = replace(decoder.config, num_layers=1)  # all matrix shapes at a fraction of the work
    small = type(decoder)(config, {name: parameter.detach() for name, parameter in decoder.named_parameters()})
    return (
        _row_steps_hold(small, regime.row_pad)
        and _attention_holds(config, decoder.dtype, regime)
        and _products_hold(small, regime.row_pad)
        and _decoder_holds(small, regime)
    )


def _noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _cache(config: DecoderConfig) -> LayerCache:
    return LayerCache(config.num_kv_heads, config.head_dim, config.head_dim)


def _row_steps_hold(decoder: Decoder, row_pad: int) -> bool:
    """Every step between the products, where torch begins to cut it between one thread more: rows together against the
    same rows in the smallest passes there are."""
    layer, config = decoder.layers[0], decoder.config
    assert isinstance(layer, Layer)
    inner, heads, size = config.intermediate_size, config.num_heads, config.head_dim
    weight, drawn = _noise(1, heads, size, dtype=decoder.dtype), Rules.of([SamplingParams(1, temperature=0.7)])

    def turned(x: Tensor) -> Tensor:
        return rotate(x, *decoder.rotations(torch.full((len(x),), config.context_length - 1)))

    def chosen(logits: Tensor) -> Tensor:
        ids, logprobs = choose(logits, drawn, np.full(len(logits), 0.5))
        return torch.stack((ids.double(), logprobs.double()), dim=-1)

    # What takes rows and gives rows, the shape of a row, and how many numbers of one such a step may be cut between.
    steps: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...], int, torch.dtype]] = [
        (lambda x: layer.activated(x.chunk(2, dim=-1)[0]), (2 * inner,), inner, decoder.dtype),
        (lambda x: rms_norm(x, layer.mlp_norm, layer.eps), (config.hidden_size,), config.hidden_size, decoder.dtype),
        (lambda x: rms_norm(x, weight, layer.eps), (heads, size), heads * size, decoder.dtype),
        (lambda x: rms_norm(x, weight, layer.eps), (heads, size), heads, decoder.dtype),  # a root for each head
        (turned, (heads, size), heads * size, decoder.dtype),
        (chosen, (config.vocab_size,), config.vocab_size, torch.float32),
    ]
    for step, shape, width, dtype in steps:
        for count in _borders(width, row_pad):
            x = _noise(count, count, *shape, dtype=dtype)
            if not torch.equal(step(x), torch.cat([step(rows) for rows in torch.split(x, row_pad)])):
                return False
    return True


def _borders(width: int, row_pad: int) -> list[int]:
    """Counts of rows with about as many numbers as torch gives to one thread, to two, and so on, and to one more than
    there are."""
    around = (CUT * shares // width + row_pad * extra
              for shares in range(1, torch.get_num_threads() + 2) for extra in (0, 1, 2))  # fmt: skip
    return sorted({min(padded(max(count, 1), row_pad), padded(MOST_ROWS, row_pad)) for count in around})


def _attention_holds(config: DecoderConfig, dtype: torch.dtype, regime: Regime) -> bool:
    """One sequence attended as a whole is the reference; pieces of it and single tokens, alone and side by side with
    others in caches of several capacities, must reproduce it."""
    length = min(SEQUENCE, config.context_length)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (_noise(seed, length, count, config.head_dim, dtype=dtype) for seed, count in enumerate(heads))
    whole = exact([length], regime)(0, q, k, v, PLAIN)
    for count, fed, room in ((5, 5, 96), (24, 1, 0)):
        rows = ActiveRows([_cache(config)], dtype, count)
        rows.reserve(count, length + room)
        for chunks in _feeding(fed, length):
            places = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
            attend = cached_prefill(rows, chunks, regime)
            if not torch.equal(attend(0, q[places], k[places], v[places], PLAIN), whole[places]):
                return False
        for row in range(fed, count):
            rows.write(row, 0, rows.read(0, 0, length))
        drawn = np.random.default_rng(count)
        for batch in (batch for batch in BATCHES if batch <= count):
            for _ in range(4):
                places = torch.from_numpy(drawn.integers(drawn.integers(1, length + 1), size=batch))
                attend = cached_decode(rows, places, regime)
                if not torch.equal(attend(0, q[places], k[places], v[places], PLAIN), whole[places]):
                    return False
    return _padding_is_invisible(config, dtype, regime)


def _feeding(count: int, length: int) -> Iterator[list[Chunk]]:
    """Every row gets the whole sequence in pieces of its own; those of a call lie side by side."""
    fed, turn = [0] * count, 0
    while min(fed) < length:
        sizes = [PIECES[(turn + 4 * row) % len(PIECES)] for row in range(count)]
        chunks = [Chunk(row, fed[row], min(fed[row] + sizes[row], length)) for row in range(count)]
        yield [chunk for chunk in chunks if chunk.length > 0]
        fed, turn = [chunk.end for chunk in chunks], turn + 1


def _padding_is_invisible(config: DecoderConfig, dtype: torch.dtype, regime: Regime) -> bool:
    """The next token of a long cache alone, beside longer ones, and as a prefill of one."""
    last = config.context_length - 1
    for short, longest in ((min(700, last // 2), min(LONG, last)), (min(LONG, last // 2), min(LONGEST, last))):
        alone, batched = (ActiveRows([_cache(config)], dtype, count) for count in (1, 3))
        batched.reserve(3, longest + 1)
        for tensor in (*batched.keys, *batched.values):
            tensor.copy_(_noise(1, *tensor.shape, dtype=dtype))
        alone.reserve(1, short + 1)
        alone.write(0, 0, batched.read(1, 0, short))
        q, k, v = (_noise(seed, 3, n, config.head_dim, dtype=dtype) for seed, n in
                   enumerate((config.num_heads, config.num_kv_heads, config.num_kv_heads)))  # fmt: skip
        among = cached_decode(batched, torch.tensor([longest, short, longest - 1]), regime)(0, q, k, v, PLAIN)[1:2]
        mine = (q[1:2], k[1:2], v[1:2])
        for attend in (cached_decode(alone, torch.tensor([short]), regime),
                       cached_prefill(alone, [Chunk(0, short, short + 1)], regime)):  # fmt: skip
            if not torch.equal(attend(0, *mine, PLAIN), among):
                return False
    return True


def _products_hold(decoder: Decoder, row_pad: int) -> bool:
    """Every weight, with many counts of rows and the same rows at other places."""
    layer = decoder.layers[0]
    assert isinstance(layer, Layer)
    for name in ("qkv", "output", "gate_up", "down", None):
        weight = decoder.unembed if name is None else getattr(layer, name)
        most = max(5, min(MOST_ROWS, MULTIPLICATIONS // weight.numel()) // row_pad) * row_pad
        x = _noise(0, most, weight.shape[1], dtype=decoder.dtype)
        whole = decoder.logits(x) if name is None else layer.linear(name, x)
        for count in (row_pad * times for times in (1, 2, 3, 4, 5, 7, 9, 13, 20, 33, 64) if row_pad * times < most):
            start = (5 * count + 3) % (most - count + 1)
            rows = x[start : start + count].clone()
            product = decoder.logits(rows) if name is None else layer.linear(name, rows)
            if not torch.equal(product, whole[start : start + count]):
                return False
    return True


def _decoder_holds(decoder: Decoder, regime: Regime) -> bool:
    """All of it together: one whole-sequence pass is the reference; prompts fed in pieces, tokens decoded in batches of
    several sizes and many prompts at once must reproduce its logits, and the log-probs made of them."""
    config = decoder.config
    length = min(150, config.context_length)
    ids = torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    places = torch.arange(length)
    hidden = decoder(ModelInputs(pad_rows(ids, regime), pad_rows(places, regime)), exact([length], regime))
    whole = decoder.logits(hidden)
    logprobs = torch.log_softmax(whole, dim=-1)
    tokens: NDArray[np.int64] = ids.numpy()

    def agrees(logits: Tensor, at: list[int]) -> bool:
        return torch.equal(logits, whole[at]) and torch.equal(torch.log_softmax(logits, dim=-1), logprobs[at])

    for count in (1, 17) if decoder.unembed.numel() > MULTIPLICATIONS // 100 else (1, 3, 17, 40):
        rows = ActiveRows(decoder.shape.caches, decoder.dtype, count)
        rows.reserve(count, length)
        ends = [2 + 37 * row % (length - 4) for row in range(count)]
        for pieces in ([Chunk(row, 0, ends[row] // 2) for row in range(count)],
                       [Chunk(row, ends[row] // 2, ends[row]) for row in range(count)]):  # fmt: skip
            parts = [tokens[piece.start : piece.end] for piece in pieces]
            if not agrees(prefill(decoder, rows, pieces, parts, regime), [piece.end - 1 for piece in pieces]):
                return False
        for shift in range(2):
            at = np.array(ends, dtype=np.int64) + shift
            if not agrees(decode(decoder, rows, tokens[at], at, regime), at.tolist()):
                return False
    weights = sum(parameter.numel() for parameter in decoder.layers.parameters())
    count = max(2, min(13, 10 * MULTIPLICATIONS // (weights * length)))
    rows = ActiveRows(decoder.shape.caches, decoder.dtype, count)
    rows.reserve(count, length)
    attend = cached_prefill(rows, [Chunk(row, 0, length) for row in range(count)], regime)
    inputs = ModelInputs(pad_rows(ids.repeat(count), regime), pad_rows(places.repeat(count), regime))
    many = decoder(inputs, attend)
    return all(torch.equal(part, hidden[:length]) for part in many[: count * length].split(length))


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

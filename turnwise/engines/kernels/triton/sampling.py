"""Triton kernels of token choice: the draw from chunk sums, and what a drawn token does to its slot."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engines.kernels.triton.logprobs import CHUNK, RowSums, padded_chunks, scaled_logits

_STRIDE = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _uniform(key, position):
    """The splitmix64 number of a key (its bits as int64) and an absolute position, in [0, 1) with 53 bits."""
    x = key.to(tl.uint64, bitcast=True) + (position.to(tl.int64) + 1).to(tl.uint64) * _STRIDE
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _pick(
    logits,
    keys,
    places,
    temperature,
    chunk_max,
    chunk_sum,
    row_max,
    row_log,
    tokens,
    logprobs,
    vocab,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Find the chunk in which the cumulative weight passes u * total, then the token in it; no other is read again.

    Sums are float64 here: u has 53 bits, and float32 would misdraw rare tokens. A token or chunk without weight is
    never taken, whatever the rounding; where none passes, it is the last that has weight.
    """
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    greedy = t == 0.0
    chunks = tl.cdiv(vocab, CHUNK)
    index = tl.arange(0, CHUNKS)
    m = tl.load(chunk_max + row * chunks + index, mask=index < chunks, other=float("-inf"))
    s = tl.load(chunk_sum + row * chunks + index, mask=index < chunks, other=0.0)
    highest = tl.load(row_max + row)
    factor = tl.where(m == float("-inf"), 0.0, tl.exp(m - highest))
    weight = s.to(tl.float64) * factor.to(tl.float64)
    cumulative = tl.cumsum(weight, 0)
    target = _uniform(tl.load(keys + row), tl.load(places + row)) * tl.sum(weight, 0)
    last = tl.max(tl.where(weight > 0.0, index, 0), 0)
    drawn = tl.min(tl.where((cumulative > target) & (weight > 0.0), index, last), 0)
    likeliest = tl.min(tl.where((m == highest) & (index < chunks), index, chunks - 1), 0)
    chunk = tl.where(greedy, likeliest, drawn)
    rest = target - tl.sum(tl.where(index < chunk, weight, 0.0), 0)
    shift = tl.sum(tl.where(index == chunk, m, 0.0), 0)
    share = tl.sum(tl.where(index == chunk, factor, 0.0), 0).to(tl.float64)

    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab
    x = tl.load(logits + row.to(tl.int64) * vocab + column, mask=inside, other=float("-inf"))
    x = scaled_logits(x, t)
    p = tl.where(inside, tl.exp(x - shift), 0.0).to(tl.float64) * share
    within = tl.cumsum(p, 0)
    final = tl.max(tl.where(p > 0.0, column, chunk * CHUNK), 0)
    drawn_token = tl.min(tl.where((within > rest) & (p > 0.0), column, final), 0)
    best_token = tl.min(tl.where((x == highest) & inside, column, vocab - 1), 0)
    token = tl.where(greedy, best_token, drawn_token)
    chosen = tl.sum(tl.where(column == token, x, 0.0), 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - highest - tl.load(row_log + row))


@triton.jit
def _advance(
    tokens,
    logprobs,
    rows,
    active,
    last_token,
    places,
    remaining,
    stop_ids,
    out_tokens,
    out_logprobs,
    step,
    count,
    lines,
    STOPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for all rows, whose threads have all read what is there before one of them writes."""
    line = tl.load(step)
    tl.debug_barrier()
    room = line < lines
    for block in range(BLOCKS):
        row = block * BLOCK + tl.arange(0, BLOCK)
        inside = (row < count) & room
        slot = tl.load(rows + row, mask=inside, other=-1).to(tl.int64)
        moving = inside & (slot >= 0)
        moving = moving & (tl.load(active + slot, mask=moving, other=0) != 0)
        token = tl.load(tokens + row, mask=moving, other=-1)
        logprob = tl.load(logprobs + row, mask=moving, other=0.0)
        out = line.to(tl.int64) * count + row
        tl.store(out_tokens + out, token, mask=inside)
        tl.store(out_logprobs + out, logprob, mask=inside)
        left = tl.load(remaining + slot, mask=moving, other=0) - 1
        position = tl.load(places + slot, mask=moving, other=0) + 1
        ended = (left <= 0) | (logprob != logprob)
        for k in tl.static_range(STOPS):
            ended = ended | (tl.load(stop_ids + slot * STOPS + k, mask=moving, other=-1) == token)
        tl.debug_barrier()
        tl.store(last_token + slot, token, mask=moving)
        tl.store(places + slot, position, mask=moving)
        tl.store(remaining + slot, left, mask=moving)
        tl.store(active + slot, tl.where(ended, 0, 1), mask=moving)
    if room:
        tl.store(step, line + 1)


def choose(logits: Tensor, keys: Tensor, places: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, RowSums]:
    """See `sampling.choose`, nobody filtering; the sums of the rows come along for other tokens of theirs."""
    count, vocab = logits.shape
    sums = RowSums(logits, temperature.contiguous())
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
    if count:
        inputs = (sums.logits, keys.contiguous(), places.contiguous(), sums.temperature)
        outputs = (sums.chunk_max, sums.chunk_sum, sums.max, sums.log, tokens, logprobs)
        _pick[(count,)](*inputs, *outputs, vocab, CHUNKS=padded_chunks(vocab), CHUNK=CHUNK, num_warps=8)
    return tokens, logprobs, sums


def advance(
    tokens: Tensor,
    logprobs: Tensor,
    rows: Tensor,
    slots: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    out_tokens: Tensor,
    out_logprobs: Tensor,
    step: Tensor,
) -> None:
    """See `sampling.advance`; `slots` are active, last_token, places, remaining and stop_ids."""
    lines, count = out_tokens.shape
    tensors = (tokens, logprobs, rows, *slots, out_tokens, out_logprobs)
    assert len(tokens) == len(rows) == count and all(part.is_contiguous() for part in tensors)
    block = min(1024, max(128, triton.next_power_of_2(count)))
    constants = {"STOPS": slots[4].shape[1], "BLOCKS": triton.cdiv(count, block), "BLOCK": block}
    _advance[(1,)](*tensors, step, count, lines, **constants, num_warps=4)

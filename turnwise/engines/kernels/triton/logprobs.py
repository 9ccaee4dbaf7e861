"""Triton kernels of token scores: sums of a row in chunks of fixed size, so that its bits are its own alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Logits that one program adds up. Sampler and learner must agree on it, or their log-probs differ in the last bit."""


@triton.jit
def scaled_logits(x, temperature):
    """Logits over temperature, rounded to nearest; 0 and 1 leave them alone."""
    y = x
    if (temperature != 1.0) & (temperature != 0.0):
        y = tl.div_rn(x, temperature)
    return y


@triton.jit
def _chunk_sums(logits, temperature, chunk_max, chunk_sum, chunk_moment, vocab, CHUNK: tl.constexpr):
    """Of one chunk of one row: the maximum m, the sum of exp(x - m), and the sum of (x - m) * exp(x - m)."""
    program = tl.program_id(0)
    chunks = tl.cdiv(vocab, CHUNK)
    row = program // chunks
    column = (program % chunks) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=float("-inf"))
    x = scaled_logits(x, tl.load(temperature + row))
    highest = tl.max(x, 0)
    shifted = x - tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp(shifted)
    tl.store(chunk_max + program, highest)
    tl.store(chunk_sum + program, tl.sum(p, 0))
    tl.store(chunk_moment + program, tl.sum(tl.where(p > 0.0, p * shifted, 0.0), 0))


@triton.jit
def _row_sums(chunk_max, chunk_sum, chunk_moment, row_max, row_log, entropies, lse, chunks, CHUNKS: tl.constexpr):
    """A row from its chunks: the maximum, the log of the sum of exp(x - max), the entropy and the log-sum-exp."""
    row = tl.program_id(0)
    index = tl.arange(0, CHUNKS)
    inside = index < chunks
    offset = row * chunks + index
    m = tl.load(chunk_max + offset, mask=inside, other=float("-inf"))
    s = tl.load(chunk_sum + offset, mask=inside, other=0.0)
    moment = tl.load(chunk_moment + offset, mask=inside, other=0.0)
    highest = tl.max(m, 0)
    empty = m == float("-inf")
    gap = tl.where(empty, 0.0, m - highest)
    factor = tl.where(empty, 0.0, tl.exp(gap))
    total = tl.sum(s * factor, 0)
    log_total = tl.log(total)
    tl.store(row_max + row, highest)
    tl.store(row_log + row, log_total)
    tl.store(entropies + row, log_total - tl.sum((moment + gap * s) * factor, 0) / total)
    tl.store(lse + row, highest + log_total)


@triton.jit
def _target_logprobs(logits, targets, temperature, row_max, row_log, logprobs, count, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    target = tl.load(targets + row, mask=inside, other=0).to(tl.int64)
    valid = inside & (target >= 0) & (target < vocab)
    x = tl.load(logits + row.to(tl.int64) * vocab + target, mask=valid, other=float("nan"))
    t = tl.load(temperature + row, mask=inside, other=1.0)
    t = tl.where(t == 0.0, 1.0, t)
    highest = tl.load(row_max + row, mask=inside, other=0.0)
    log_total = tl.load(row_log + row, mask=inside, other=0.0)
    tl.store(logprobs + row, tl.div_rn(x, t) - highest - log_total, mask=inside)


@triton.jit
def _gradient(
    logits,
    targets,
    lse,
    entropies,
    by_logprob,
    by_entropy,
    out,
    temperature,
    vocab,
    LOGPROB: tl.constexpr,
    ENTROPY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    chunks = tl.cdiv(vocab, CHUNK)
    row = program // chunks
    column = (program % chunks) * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab
    start = row.to(tl.int64) * vocab
    x = tl.load(logits + start + column, mask=inside, other=float("-inf"))
    logp = scaled_logits(x, temperature) - tl.load(lse + row)
    p = tl.exp(logp)
    gradient = tl.zeros([CHUNK], dtype=tl.float32)
    if LOGPROB:
        pull = tl.load(by_logprob + row)
        target = tl.load(targets + row).to(tl.int32)
        gradient += tl.where(column == target, pull, 0.0) - p * pull
    if ENTROPY:
        spread = tl.load(by_entropy + row)
        gradient -= tl.where(p > 0.0, p * (logp + tl.load(entropies + row)), 0.0) * spread
    gradient = scaled_logits(gradient, temperature)
    tl.store(out + start + column, gradient.to(out.dtype.element_ty), mask=inside)


class RowSums:
    """What one pass over the logits leaves: per chunk [n, chunks] and per row [n], all float32."""

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        count, vocab = logits.shape
        chunks = triton.cdiv(vocab, CHUNK)
        self.logits = _rows(logits)
        self.temperature = temperature
        self.chunk_max, self.chunk_sum, moment = (
            torch.empty((count, chunks), dtype=torch.float32, device=logits.device) for _ in range(3)
        )
        self.max, self.log, self.entropies, self.lse = (
            torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(4)
        )
        if count == 0:
            return
        sums = (self.chunk_max, self.chunk_sum, moment)
        _chunk_sums[(count * chunks,)](self.logits, temperature, *sums, vocab, CHUNK=CHUNK, num_warps=8)
        rows = (self.max, self.log, self.entropies, self.lse)
        _row_sums[(count,)](*sums, *rows, chunks, CHUNKS=padded_chunks(vocab), num_warps=1)

    def logprobs(self, targets: Tensor) -> Tensor:
        """Of one token a row [n]; a target outside the vocabulary gives NaN."""
        count, vocab = self.logits.shape
        result = torch.empty(count, dtype=torch.float32, device=self.logits.device)
        if count:
            inputs = (self.logits, targets.contiguous(), self.temperature, self.max, self.log)
            _target_logprobs[(triton.cdiv(count, 128),)](*inputs, result, count, vocab, BLOCK=128, num_warps=4)
        return result


def padded_chunks(vocab: int) -> int:
    """Chunks of a row, as a power of two that every reduction takes."""
    return max(16, triton.next_power_of_2(triton.cdiv(vocab, CHUNK)))


def _rows(logits: Tensor) -> Tensor:
    """Whole rows from an aligned address: a kernel compiled for another alignment might add in another order."""
    assert logits.dtype == torch.float32
    logits = logits.contiguous()
    return logits if logits.data_ptr() % 16 == 0 else logits.clone()


def score_rows(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The Triton kernel of `scores.score_rows`, with the same arguments and results."""
    sums = RowSums(logits, torch.full((len(logits),), temperature, dtype=torch.float32, device=logits.device))
    return sums.logprobs(targets), sums.entropies, sums.lse


def score_gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropies: Tensor,
    by_logprob: Tensor | None,
    by_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """The Triton kernel of `scores.score_gradient`, with the same arguments and result."""
    logits = _rows(logits)
    count, vocab = logits.shape
    out = torch.empty((count, vocab), dtype=dtype, device=logits.device)
    if count:
        pulls = [lse if pull is None else pull.float().contiguous() for pull in (by_logprob, by_entropy)]
        tensors = (logits, targets.contiguous(), lse.contiguous(), entropies.contiguous(), *pulls, out)
        wanted = {"LOGPROB": by_logprob is not None, "ENTROPY": by_entropy is not None}
        programs = count * triton.cdiv(vocab, CHUNK)
        _gradient[(programs,)](*tensors, float(temperature), vocab, **wanted, CHUNK=CHUNK, num_warps=8)
    return out

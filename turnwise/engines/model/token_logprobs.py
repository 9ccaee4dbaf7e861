"""Log-probs and entropies of chosen tokens, a chunk at a time, so that the logits of a batch are never held at once."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.engines.kernels.dispatch import use_triton
from turnwise.engines.kernels.linear import invariant_linear, linear
from turnwise.engines.kernels.logprobs import score_gradient, score_rows


@dataclass(frozen=True, slots=True)
class LogitShape:
    """What a model does to the products of its head: times `scale`, then bent to c * tanh(x / c) by a soft cap."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """The model's logits from the products, which are used up."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def back_(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """The gradient of the products from that of the logits, which a soft cap needs too; both are used up."""
        if self.softcap is not None:
            assert logits is not None
            gradient = gradient.mul_(logits.div_(self.softcap).square_().neg_().add_(1.0))
        return gradient.mul_(self.scale) if self.scale != 1.0 else gradient


PLAIN_LOGITS = LogitShape()


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    bias: Tensor | None = None,
    shape: LogitShape = PLAIN_LOGITS,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets[N]` and entropy, both [N] and differentiable, from hidden states [N, H] and the head [V, H].

    Logits are divided by the temperature as the sampler does (0 and 1 leave them alone). Backward computes them again,
    chunk by chunk; an entropy that the loss does not use costs nothing there. `invariant` makes the bits of a row on a
    GPU those of the batch-invariant sampler; on the CPU they always are.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    arguments = (hidden, weight, bias, targets, temperature or 1.0, chunk, shape)
    if use_triton(hidden) and hidden.dtype != torch.float64:
        return cast(tuple[Tensor, Tensor], cast(Any, _KernelScores).apply(*arguments, invariant))
    scores = cast(Any, _TokenScores).apply(*arguments)
    return cast(tuple[Tensor, Tensor], scores)


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Logprobs of given tokens [T] under logits [T, V]: what `choose` reports; temperature 0 leaves logits unscaled."""
    if use_triton(logits):
        return score_rows(logits, token_ids, temperature).logprobs
    scaled = logits if temperature in (0.0, 1.0) else logits / torch.tensor(temperature, dtype=torch.float32)
    return torch.log_softmax(scaled, dim=-1).gather(1, token_ids.unsqueeze(1)).squeeze(1)


class _TokenScores(torch.autograd.Function):
    """Forward walks the chunks up and backward down, so that the last chunk's log-probs serve both."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        shape: LogitShape,
    ) -> tuple[Tensor, Tensor]:
        count = len(targets)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = (torch.empty(count, dtype=wide, device=hidden.device) for _ in range(2))
        last = None
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(hidden.dtype)
            for start in range(0, count, chunk):
                part = slice(start, start + chunk)
                del last  # before the next one is made: one chunk at a time is the point
                last = _log_softmax(_logits(hidden[part], head, bias, shape), temperature)
                logprobs[part] = last.gather(1, targets[part, None]).squeeze(1)
                entropy[part] = -(last.exp().mul_(last)).sum(-1)
        ctx.set_materialize_grads(False)
        # A soft cap's gradient needs the logits too, so nothing of the last chunk is worth keeping for it.
        ctx.temperature, ctx.chunk, ctx.shape, ctx.last = temperature, chunk, shape, None if shape.softcap else last
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_logprob, by_entropy = gradients
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        if by_logprob is None and by_entropy is None:
            return (None,) * 7
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        head = weight.to(hidden.dtype)
        for start in reversed(range(0, len(targets), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            logp, ctx.last = ctx.last, None
            logits = _logits(hidden[part], head, bias, ctx.shape) if ctx.shape.softcap else None
            if logits is not None:
                logp = _log_softmax(logits.clone(), ctx.temperature)
            elif logp is None:
                logp = _log_softmax(_logits(hidden[part], head, bias, ctx.shape), ctx.temperature)
            wide = _to_logits(logp, targets[part], _cut(by_logprob, part), _cut(by_entropy, part), entropy[part])
            del logp
            wide = wide if ctx.temperature == 1.0 else wide.div_(ctx.temperature)
            to_logits = ctx.shape.back_(wide, logits).to(hidden.dtype)
            del wide, logits
            if to_hidden is not None:
                torch.mm(to_logits, head, out=to_hidden[part])
            if to_weight is not None and to_weight.dtype == to_logits.dtype:
                to_weight.addmm_(to_logits.t(), hidden[part])
            elif to_weight is not None:  # narrow products, but the sum over chunks stays wide
                to_weight.add_(to_logits.t() @ hidden[part])
            if to_bias is not None:
                to_bias.add_(to_logits.sum(0))
        return to_hidden, to_weight, to_bias, None, None, None, None


def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None, shape: LogitShape) -> Tensor:
    logits = torch.mm(hidden, head.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    return shape.apply(logits if bias is None else logits.add_(bias))


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """The log-softmax at a temperature; the logits are overwritten."""
    return torch.log_softmax(logits if temperature == 1.0 else logits.div_(temperature), dim=-1)


def _cut(gradient: Tensor | None, part: slice) -> Tensor | None:
    return None if gradient is None else gradient[part].unsqueeze(1)


def _to_logits(
    logp: Tensor, targets: Tensor, by_logprob: Tensor | None, by_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """The gradient of the scaled logits; `logp` is used up.

    With p the probabilities, y the target and h the entropy: d logprob = [y] - p and d entropy = -p * (log p + h).
    """
    if by_entropy is None:
        assert by_logprob is not None
        return logp.exp_().mul_(-by_logprob).scatter_add_(1, targets.unsqueeze(1), by_logprob)
    pull = (logp + entropy.unsqueeze(1)).mul_(by_entropy)
    if by_logprob is None:
        return logp.exp_().mul_(pull).neg_()
    return logp.exp_().mul_(pull.add_(by_logprob)).neg_().scatter_add_(1, targets.unsqueeze(1), by_logprob)


class _KernelScores(torch.autograd.Function):
    """The same by kernels that read the logits once forward and once backward, in float32 whatever the factors are.

    Forward walks the chunks up and backward down, so that the last chunk's logits serve both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        shape: LogitShape,
        invariant: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, lse = (
            torch.empty(len(targets), dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        logits = None
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(hidden.dtype)
            for start in range(0, len(targets), chunk):
                part = slice(start, start + chunk)
                del logits  # before the next one is made: one chunk at a time is the point
                logits = _wide_logits(hidden[part], head, bias, shape, invariant)
                logprobs[part], entropy[part], lse[part] = score_rows(logits, targets[part], temperature)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk, ctx.shape, ctx.invariant, ctx.last = temperature, chunk, shape, invariant, logits
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, lse)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_logprob, by_entropy = gradients
        hidden, weight, bias, targets, entropy, lse = ctx.saved_tensors
        if by_logprob is None and by_entropy is None:
            return (None,) * 8
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Narrow factors, but the sum over several chunks is wide.
        wide = torch.float32 if len(targets) > ctx.chunk else torch.promote_types(hidden.dtype, weight.dtype)
        to_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        head = weight.to(hidden.dtype)
        for start in reversed(range(0, len(targets), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            logits, ctx.last = ctx.last, None
            if logits is None:
                logits = _wide_logits(hidden[part], head, bias, ctx.shape, ctx.invariant)
            pulls = (_part(by_logprob, part), _part(by_entropy, part))
            dtype = hidden.dtype if ctx.shape == PLAIN_LOGITS else torch.float32
            to_logits = score_gradient(logits, targets[part], lse[part], entropy[part], *pulls, ctx.temperature, dtype)
            if ctx.shape != PLAIN_LOGITS:
                to_logits = ctx.shape.back_(to_logits, logits).to(hidden.dtype)
            del logits
            if to_hidden is not None:
                torch.mm(to_logits, head, out=to_hidden[part])
            if to_weight is not None and wide == hidden.dtype:
                to_weight.addmm_(to_logits.t(), hidden[part])
            elif to_weight is not None:
                to_weight.add_(linear(to_logits.t(), hidden[part].t(), out_dtype=wide))
            if to_bias is not None:
                to_bias.add_(to_logits.sum(0, dtype=torch.float32))
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None, None, None, None


def _part(gradient: Tensor | None, part: slice) -> Tensor | None:
    return None if gradient is None else gradient[part]


def _wide_logits(hidden: Tensor, head: Tensor, bias: Tensor | None, shape: LogitShape, invariant: bool) -> Tensor:
    product = invariant_linear if invariant else linear
    return shape.apply(product(hidden, head, bias, out_dtype=torch.float32))

"""Log-probs and entropies of chosen tokens, a chunk at a time, so that the logits of a batch are never held at once."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets[N]` and entropy, both [N] and differentiable, from hidden states [N, H] and the head [V, H].

    Logits are divided by the temperature as the sampler does (0 and 1 leave them alone). Backward computes them again,
    chunk by chunk; an entropy that the loss does not use costs nothing there.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    scores = cast(Any, _TokenScores).apply(hidden, weight, targets, temperature or 1.0, chunk)
    return cast(tuple[Tensor, Tensor], scores)


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Logprobs of given tokens [T] under logits [T, V]: what `choose` reports; temperature 0 leaves logits unscaled."""
    scaled = logits if temperature in (0.0, 1.0) else logits / torch.tensor(temperature, dtype=torch.float32)
    return torch.log_softmax(scaled, dim=-1).gather(1, token_ids.unsqueeze(1)).squeeze(1)


class _TokenScores(torch.autograd.Function):
    """Forward walks the chunks up and backward down, so that the last chunk's log-probs serve both."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
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
                last = _log_softmax(hidden[part], head, temperature)
                logprobs[part] = last.gather(1, targets[part, None]).squeeze(1)
                entropy[part] = -(last.exp().mul_(last)).sum(-1)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk, ctx.last = temperature, chunk, last
        ctx.save_for_backward(hidden, weight, targets, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_logprob, by_entropy = gradients
        hidden, weight, targets, entropy = ctx.saved_tensors
        if by_logprob is None and by_entropy is None:
            return None, None, None, None, None
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        head = weight.to(hidden.dtype)
        for start in reversed(range(0, len(targets), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            logp, ctx.last = ctx.last, None
            if logp is None:
                logp = _log_softmax(hidden[part], head, ctx.temperature)
            wide = _to_logits(logp, targets[part], _cut(by_logprob, part), _cut(by_entropy, part), entropy[part])
            del logp
            to_logits = (wide if ctx.temperature == 1.0 else wide.div_(ctx.temperature)).to(hidden.dtype)
            del wide
            if to_hidden is not None:
                torch.mm(to_logits, head, out=to_hidden[part])
            if to_weight is not None and to_weight.dtype == to_logits.dtype:
                to_weight.addmm_(to_logits.t(), hidden[part])
            elif to_weight is not None:  # narrow products, but the sum over chunks stays wide
                to_weight.add_(to_logits.t() @ hidden[part])
        return to_hidden, to_weight, None, None, None


def _log_softmax(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = torch.mm(hidden, head.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    if temperature != 1.0:
        logits.div_(temperature)
    return torch.log_softmax(logits, dim=-1)


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

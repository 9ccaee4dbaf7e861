"""Log-probs and entropies of rows of logits, and their gradient: one pass over the logits each."""

from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.engines.kernels.dispatch import use_triton


class Scores(NamedTuple):
    """Of each row, in float32 [n]; the entropy and the log-sum-exp are those of the scaled logits."""

    logprobs: Tensor
    entropies: Tensor
    lse: Tensor


def score_rows(logits: Tensor, targets: Tensor, temperature: float) -> Scores:
    """Scores of `targets[n]` under logits [n, V] in float32, divided by the temperature (0 and 1 leave them alone).

    The log-probs have the bits that `sampling.choose` gives the same row, token and temperature. A row with NaN, and
    one that is -inf all over, scores NaN.
    """
    if use_triton(logits):
        from turnwise.engines.kernels.triton import logprobs as triton_logprobs

        return Scores(*triton_logprobs.score_rows(logits, targets, temperature))
    scaled = logits if temperature in (0.0, 1.0) else logits / torch.tensor(temperature, dtype=torch.float32)
    logp = torch.log_softmax(scaled, dim=-1)
    logprobs = logp.gather(1, targets.unsqueeze(1)).squeeze(1)
    return Scores(logprobs, torch.special.entr(logp.exp()).sum(-1), torch.logsumexp(scaled, -1))


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
    """The gradient [n, V] of the logits in `dtype` from those of the scores, either of which may be missing.

    With p the probabilities, y the target and h the entropy: d logprob = [y] - p and d entropy = -p * (log p + h).
    """
    if use_triton(logits):
        from turnwise.engines.kernels.triton import logprobs as triton_logprobs

        pulls = (by_logprob, by_entropy)
        return triton_logprobs.score_gradient(logits, targets, lse, entropies, *pulls, temperature, dtype)
    scale = temperature or 1.0
    logp = logits / scale - lse.unsqueeze(1)
    p = logp.exp()
    gradient = torch.zeros_like(p)
    if by_logprob is not None:
        gradient.sub_(p * by_logprob.unsqueeze(1))
        gradient.scatter_add_(1, targets.unsqueeze(1), by_logprob.unsqueeze(1))
    if by_entropy is not None:  # what cannot happen has no part in the entropy, though its log is -inf
        gradient.sub_(torch.where(p > 0, p * (logp + entropies.unsqueeze(1)), 0.0) * by_entropy.unsqueeze(1))
    return gradient.div_(scale).to(dtype)

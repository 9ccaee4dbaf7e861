"""How far the policy is from its reference at a token: the estimators.

The gradients by the policy's logprob lp, with ref the reference's: k1 1, abs the sign of lp - ref, k2 lp - ref, k3
1 - exp(ref - lp) as far as K3_LIMIT and 0 beyond. Averaged over the policy's own samples k1's is zero, so k1 belongs in
a reward and k2 or k3 in a loss.
"""

import torch
from torch import Tensor

from turnwise.config.choices import KLEstimator

LOG_RATIO_LIMIT = 20.0
"""exp of a log-ratio beyond this says nothing more; the bound keeps it finite."""
K3_LIMIT = 10.0
"""k3 grows as exp(ref - lp): unbounded, one token that the policy has all but given up outweighs a whole batch."""


def estimate(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """The estimate at every token, with gradient."""
    if logprobs.shape != reference.shape:
        raise ValueError(f"{tuple(logprobs.shape)} logprobs with {tuple(reference.shape)} of the reference")
    difference = logprobs - reference
    match estimator:
        case KLEstimator.k1:
            return difference
        case KLEstimator.abs:
            return difference.abs()
        case KLEstimator.k2:
            return 0.5 * difference.square()
        case KLEstimator.k3:
            bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            # expm1 keeps the digits that exp(x) - 1 loses when the two policies nearly agree.
            return (torch.expm1(-bounded) + bounded).clamp(max=K3_LIMIT)

"""Packed tokens for a learner without a training sequence in sight: `batch_of(tokens, [4, 3], index)`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.engines.learners.learner import TokenBatch, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.losses import PolicyTokens

Case = tuple[Tensor, Sequence[int], Tensor]
"""Tokens [T], the lengths of their sequences, and the places [N] of the policy's."""
Loss = Callable[[PolicyTokens], tuple[Tensor, dict[str, Any]]]


def batch_of(tokens: Tensor, lengths: Sequence[int], index: Tensor, **arrays: Any) -> TokenBatch:
    """One minibatch of one trajectory for each sequence; `arrays` are [N] numbers such as `advantages`."""
    ends = np.cumsum(lengths)
    owner = np.searchsorted(ends, index.numpy(), side="right")
    counts = np.bincount(owner, minlength=len(ends))
    given = {name: np.asarray(values, dtype=np.float32) for name, values in arrays.items()}
    return TokenBatch(
        tokens.numpy(), np.array(lengths), index.numpy(), owner, counts, len(index), len(lengths), **given
    )


def accumulate(learner: LocalLearner, case: Case, loss: Loss) -> dict[str, float]:
    """Add the gradient of any loss; returns its metrics and `loss`."""
    found = learner.accumulate(batch_of(*case), lambda tokens, batch: loss(tokens))
    return {**found.metrics, "loss": found.loss.item()}


def score(learner: LocalLearner, case: Case, who: Who = Who.POLICY) -> Tensor:
    """What one of the learner's models says of the policy's tokens."""
    return torch.from_numpy(learner.score(batch_of(*case), who))

"""Packed sequences on their way to a learner: their tokens, and what is known of those that the policy wrote."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.ledger import MediaSpan

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """One micro-batch: S sequences of T tokens end to end, N of which the policy wrote, in K trajectories.

    `trajectory_tokens`, `minibatch_tokens` and `minibatch_trajectories` count the whole minibatch, so that the
    gradients of its micro-batches add up to the gradient of one big batch. An array is None when its sequences have
    none.
    """

    tokens: Ints
    """[T] token ids."""
    lengths: Ints
    """[S] tokens of each sequence."""
    index: Ints
    """[N] position of each policy token among the T."""
    trajectory: Ints
    """[N] which of the K trajectories a policy token belongs to."""
    trajectory_tokens: Ints
    """[K] policy tokens of each trajectory, those of its segments in other micro-batches included."""
    minibatch_tokens: int
    """Policy tokens of the whole minibatch."""
    minibatch_trajectories: int
    """[N], as are those below."""
    old_logprobs: Floats | None = None
    ref_logprobs: Floats | None = None
    values: Floats | None = None
    advantages: Floats | None = None
    returns: Floats | None = None
    weights: Floats | None = None
    media: tuple[MediaSpan, ...] = ()
    """The images of all sequences, each at its place among the T; a block never crosses from one to the next."""

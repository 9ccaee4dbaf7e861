"""A token batch as tensors on a device, as losses read it."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.engines.learners.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """A `TokenBatch`, whose fields these are, where the loss is computed."""

    tokens: Tensor
    """[T] token ids."""
    lengths: tuple[int, ...]
    """[S] tokens of each sequence."""
    index: Tensor
    """[N] position of each policy token among the T."""
    trajectory: Tensor
    """[N] which of the K trajectories a policy token belongs to."""
    trajectory_tokens: Tensor
    """[K] policy tokens of each trajectory, those of its segments in other micro-batches included."""
    sampler_logprobs: Tensor | None
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None
    advantages: Tensor | None
    returns: Tensor | None
    weights: Tensor | None
    minibatch_tokens: int
    """Policy tokens of the whole minibatch."""
    minibatch_trajectories: int

    @classmethod
    def of(cls, batch: TokenBatch, device: torch.device) -> "Batch":
        """A token batch on this device; on the CPU its tensors are the batch's own arrays."""
        found: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
        arrays = {name: torch.from_numpy(v).to(device) for name, v in found.items() if isinstance(v, np.ndarray)}
        return cls(**{**found, **arrays, "lengths": tuple(batch.lengths.tolist())})

    def trajectory_sums(self, values: Tensor) -> Tensor:
        """[K] the sum over each trajectory's policy tokens here of a value per policy token, with gradient."""
        return values.new_zeros(len(self.trajectory_tokens)).index_add(0, self.trajectory, values)

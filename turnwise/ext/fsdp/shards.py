"""Tensors that are shared out over ranks: a rank's own part of them, and all of it gathered."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class WeightGatherer:
    """Gathers one weight from all ranks, narrowed where a rank's part lies if another number format is wanted."""

    device: torch.device
    dtype: torch.dtype | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        return shared_out_as(tensor, tensor.to_local().to(self.device, self.dtype)).full_tensor()


def shared_out_as(other: Tensor, local: Tensor) -> DTensor:
    """A tensor that is shared out as another is, of which this is the rank's own part."""
    assert isinstance(other, DTensor)
    return DTensor(local, other._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_part(tensor: Tensor) -> Tensor:
    """A rank's own part of what is shared out, on the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """A rank's own part and the number of its first row: torch cuts a tensor into chunks of equal size, of which the
    last may be smaller, or empty. What is not shared out is all its own."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    mesh = tensor.device_mesh
    chunk = -(-tensor.shape[0] // mesh.size(-1))
    return local_part(tensor), min(tensor.shape[0], mesh.get_local_rank(mesh.ndim - 1) * chunk)


def meta(tensor: Tensor) -> Tensor:
    """The shape and number format of all of it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

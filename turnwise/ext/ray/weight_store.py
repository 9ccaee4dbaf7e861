"""Weights in the object store: put once by the learner, read by every sampler from the store of its own node."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.engines.weight_updates import FullWeights

if TYPE_CHECKING:
    import torch

PART_BYTES = 256 * 2**20
"""Of one object in the store, unless a single tensor is larger: a learner holds one part at a time beside its own."""

Shapes = Mapping[str, tuple[int, ...]]
Part = dict[str, tuple[str, tuple[int, ...], Any]]
"""By a weight's name: its number format, its shape and its bytes, which are read in place."""


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """Which weights go into which object, and in which number format."""

    shapes: Shapes
    parts: tuple[tuple[str, ...], ...]
    dtype: str
    """As torch calls it: the sampler's, so that no more is sent than it keeps."""

    @classmethod
    def of(cls, shapes: Shapes, dtype: str) -> "WeightsPlan":
        """Parts of at most PART_BYTES, in the order of the names."""
        size, held = 2 if dtype == "bfloat16" else 4, 0
        parts: list[list[str]] = [[]]
        for name, shape in shapes.items():
            bytes_ = size * int(np.prod(shape, dtype=np.int64))
            if parts[-1] and held + bytes_ > PART_BYTES:
                parts.append([])
                held = 0
            parts[-1].append(name)
            held += bytes_
        return cls(dict(shapes), tuple(map(tuple, parts)), dtype)


def pack(
    plan: WeightsPlan, tensors: "Iterable[tuple[str, torch.Tensor]]", *, owner: int = 0, owners: int = 1
) -> Iterator[Part | None]:
    """The objects of an update, one after the other. Where several make the tensors they take turns: each copies its
    own objects, and goes through the tensors of others only."""
    import torch

    dtype = getattr(torch, plan.dtype)
    waiting: dict[str, Any] = {}
    own = {name for number, names in enumerate(plan.parts) if number % owners == owner for name in names}
    wanted = iter(plan.parts)
    names: tuple[str, ...] | None = next(wanted)
    for name, tensor in tensors:
        waiting[name] = tensor.detach().to(dtype).to("cpu").contiguous() if name in own else None
        while names is not None and all(key in waiting for key in names):
            held = [waiting.pop(key) for key in names]
            copied = own.issuperset(names)
            yield {key: _bytes(tensor) for key, tensor in zip(names, held, strict=True)} if copied else None
            names = next(wanted, None)


def _bytes(tensor: "torch.Tensor") -> tuple[str, tuple[int, ...], Any]:
    import torch

    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat


def unpack(shapes: Shapes, parts: Sequence[Part]) -> FullWeights:
    """What a sampler takes; the tensors lie in the store and are not to be written to."""
    return FullWeights(shapes, _tensors(parts))


def _tensors(parts: Sequence[Part]) -> "Iterator[tuple[str, torch.Tensor]]":
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they must not be written to: nobody does
        for part in parts:
            for name, (dtype, shape, flat) in part.items():
                yield name, torch.from_numpy(flat).view(getattr(torch, dtype)).reshape(shape)

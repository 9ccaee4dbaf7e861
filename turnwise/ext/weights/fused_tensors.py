"""Tensors that Hugging Face files fuse (a tower's q, k and v; all experts of a layer) as their parts, and back."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from turnwise.errors import StorageError
from turnwise.ext.weights.lazy_tensor import Stored

QKV = re.compile(r".*visual\.blocks\.\d+\.attn\.qkv\.(?:weight|bias)")
STACK = re.compile(r"(?P<where>.*\.mlp\.experts)\.(?P<which>gate_up_proj|down_proj)")
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _FusedPart:
    name: str
    shape: Shape
    taken: Callable[[Tensor], Tensor]


def _parts(name: str, shape: Shape) -> Iterator[_FusedPart]:
    """The parts of a fused tensor in the order in which they lie in it; none for a plain one."""
    if QKV.fullmatch(name):
        for index, letter in enumerate("qkv"):
            yield _FusedPart(f"{name}/{letter}", (shape[0] // 3, *shape[1:]), lambda whole, i=index: whole.chunk(3)[i])  # type: ignore[misc]
    elif match := STACK.fullmatch(name):
        halves = ("gate_proj", "up_proj") if match["which"] == "gate_up_proj" else ("down_proj",)
        many = len(halves)
        for expert in range(shape[0]):
            for side, half in enumerate(halves):
                yield _FusedPart(
                    f"{match['where']}.{expert}.{half}.weight",
                    (shape[1] // many, *shape[2:]),
                    lambda whole, e=expert, s=side: whole[e].chunk(many)[s],  # type: ignore[misc]
                )


def shapes_apart(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes of a model's tensors, fused ones as their parts."""
    return {
        part: size
        for name, shape in shapes.items()
        for part, size in ([(each.name, each.shape) for each in _parts(name, shape)] or [(name, shape)])
    }


@dataclass(slots=True)
class _LastRead:
    """A fused tensor is read once for all its parts when they are asked for one after the other."""

    held: dict[str, Tensor] = field(default_factory=dict)

    def part(self, name: str, whole: Stored, taken: Callable[[Tensor], Tensor]) -> Tensor:
        if name not in self.held:
            self.held.clear()
            self.held[name] = whole.read()
        return taken(self.held[name])


def apart(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """A model's tensors, fused ones as their parts."""
    last, parts = _LastRead(), dict[str, Stored]()
    for name, stored in tensors.items():
        found = list(_parts(name, stored.shape))
        for part in found:

            def read(name: str = name, stored: Stored = stored, part: _FusedPart = part) -> Tensor:
                return last.part(name, stored, part.taken)

            parts[part.name] = Stored(stored.dtype, part.shape, read)
        if not found:
            parts[name] = stored
    return parts


def together(parts: Mapping[str, Stored], shapes: Mapping[str, Shape]) -> dict[str, Stored]:
    """The tensors of files from their parts: those that `shapes` names, and what else there is."""
    tensors = dict(parts)
    for name, shape in shapes.items():
        wanted = {part.name: part.shape for part in _parts(name, shape)}
        if wanted and wanted.keys() <= tensors.keys():
            own = [tensors.pop(part) for part in wanted]
            for part, stored in zip(wanted, own, strict=True):
                if stored.shape != wanted[part]:
                    raise StorageError(f"{part} is {stored.shape}, config.json says {wanted[part]}")
            tensors[name] = Stored(own[0].dtype, shape, lambda own=own, shape=shape: _joined(own, shape))  # type: ignore[misc]
    return tensors


def _joined(own: list[Stored], shape: Shape) -> Tensor:
    return torch.cat([part.read() for part in own]).view(shape)

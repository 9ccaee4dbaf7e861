"""What moves new weights from a learner to a sampler: a stream of named tensors, an adapter, a folder, or a store."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FullWeights:
    """Every weight by its Hugging Face name; the shapes come first, so that another model's are refused untouched."""

    shapes: Mapping[str, tuple[int, ...]]
    tensors: "Iterator[tuple[str, Tensor]]"
    """To be read once, before the next step changes them."""

    def refused_by(self, shapes: Mapping[str, tuple[int, ...]]) -> EngineError | None:
        """What is wrong with these for a model that takes weights of such shapes."""
        wrong = sorted(name for name in self.shapes.keys() | shapes.keys() if self.shapes.get(name) != shapes.get(name))
        return EngineError(f"these are not the weights of this model: {', '.join(wrong[:5])}") if wrong else None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in peft's format."""

    folder: Path


@dataclass(frozen=True, slots=True)
class WeightsFolder:
    """All weights as safetensors files in a Hugging Face folder."""

    folder: Path


class StoredWeights:
    """Every weight, where samplers on other machines read them: what is in it is known to who put it there."""


Update = FullWeights | Adapter | WeightsFolder | StoredWeights

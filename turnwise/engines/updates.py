"""What moves new weights from a learner to a sampler: a stream of named tensors, an adapter, or a folder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FullWeights:
    """Every weight by its Hugging Face name; the shapes come first, so that another model's are refused untouched."""

    shapes: Mapping[str, tuple[int, ...]]
    tensors: "Iterator[tuple[str, Tensor]]"
    """To be read once, before the next step changes them."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in peft's format."""

    folder: Path


@dataclass(frozen=True, slots=True)
class WeightsFolder:
    """A Hugging Face folder."""

    folder: Path


Update = FullWeights | Adapter | WeightsFolder

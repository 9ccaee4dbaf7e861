"""What a policy model is: packed tokens in, hidden states and token scores out, weights by their Hugging Face names."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from turnwise.engines.model.checkpoint_rows import CheckpointRows, OwnRows
from turnwise.engines.model.routing import RouterShape, Routing
from turnwise.errors import EngineError
from turnwise.ledger import Media, MediaSpan

if TYPE_CHECKING:
    from turnwise.engines.model.recurrence import Recurrence


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one attention layer keeps of a token."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one recurrent layer keeps of a sequence, however long it is: tensors of these shapes and number formats."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


def state_bytes(states: Sequence[StateShape]) -> int:
    """The memory that the states of one sequence take in all recurrent layers together."""
    tensors = (pair for each in states for pair in zip(each.shapes, each.dtypes, strict=True))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What samplers and learners ask before they run a model."""

    vocab_size: int
    hidden_size: int
    context_length: int
    caches: tuple[LayerCache, ...]
    """By layer of attention, in the order of their numbers."""
    states: tuple[StateShape, ...] = ()
    """By recurrent layer, in the order of their numbers; such a model is told which tokens are one sequence."""
    routers: tuple[RouterShape, ...] = ()
    """By router of experts, in the order of their numbers; none before `follow_routers`."""
    no_packing: str | None = None
    """Why several sequences cannot share a pass, such as a recurrent layer by name; None when they can."""
    no_caching: str | None = None
    """Why a sequence cannot be continued from keys and values alone."""
    no_graphs: str | None = None
    """Why a pass cannot be captured in a CUDA graph, such as an operation whose result the host waits for."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """What a layer's attention does beside being causal: `Mixing(window=4096)`; a plain layer is `Mixing()`."""

    scale: float | None = None
    """Of the scores; None divides by the root of the head dimension."""
    window: int | None = None
    """How many keys a query sees, its own included; None means all before it."""
    softcap: float | None = None
    """Scores are bent to c * tanh(s / c)."""
    sinks: Tensor | None = None
    """[Hq] one more score per head that takes weight and gives nothing."""


Attend = Callable[[int, Tensor, Tensor, Tensor, Mixing], Tensor]
"""attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], mixing) -> [T, Hq * Dv]; only it knows who sees whom."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """T tokens without a batch dimension: one sequence, many packed ones, or one token of each of many.

    Positions are [T], or [3, T] where a model places images in time, height and width.
    """

    tokens: Tensor
    positions: Tensor
    images: "ImageFeatures | None" = None
    """The features of the images in these tokens; None for text."""
    recurrence: "Recurrence | None" = None
    """Which tokens are one sequence, and its states; read by models with recurrent layers alone."""
    routing: Routing | None = None
    """Which experts these tokens take, or where their choice is noted; only of a model that follows its routers."""


@dataclass(frozen=True, slots=True)
class Features:
    """What a model makes of one image: a row for each token of its block that takes one (`Media.takes`)."""

    rows: Tensor
    """[M, H]"""
    deep: tuple[Tensor, ...] = ()
    """[M, H] each, added to the states of the first layers by models that have them there too (Qwen3-VL)."""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """The features that stand in the place of tokens of one pass; only some rows of an image whose block is cut."""

    places: Tensor
    """[M] among the T tokens, rising."""
    rows: Tensor
    """[M, H]"""
    deep: tuple[Tensor, ...] = ()
    """[M, H] each."""


Gather = Callable[[Tensor], Tensor]
"""Of a weight that is shared out over processes, all of it: every process calls this for the same weights in order."""


def keep_tensor(tensor: Tensor) -> Tensor:
    """What a `Gather` is where nothing is shared out."""
    return tensor


def layers_recomputed(recompute: int, layers: int) -> int:
    """How many of a model's leading layers `recompute` means; True is all of them."""
    return layers if recompute is True else min(recompute, layers)


class PolicyModel(nn.Module, ABC):
    """A causal language model whose attention is the caller's and whose layers are modules with a `forward`."""

    shape: ModelShape
    facts: dict[str, Any]
    """Config and adapter as JSON holds them; what was saved of a model with others is refused by name."""
    has_adapter: bool = False
    recomputes: bool = True
    """Whether `forward` can be asked to compute layers again in backward."""

    @abstractmethod
    def forward(self, inputs: ModelInputs, attend: Attend, *, rows: Tensor | None = None, recompute: int = 0) -> Tensor:
        """Hidden states [T, H] after the final norm, or of `rows` only.

        Of the first `recompute` layers (True: of all) only what enters them is kept for backward.
        """

    reads_images: bool = False
    """Whether it takes images."""
    encoded_images: int = 0
    """How many images it has computed features of."""
    tower_calls: int = 0
    """In how many calls of its vision tower."""

    @property
    def joins_images(self) -> bool:
        """Whether it computes features of several images in one call."""
        return False

    def encode_images(self, media: Sequence[Media]) -> list[Features]:
        """The features of each image; with gradient only where the vision tower is trained."""
        raise EngineError(f"{type(self).__name__} reads text only")

    def vision_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of tower and projector, by their names here; none of a model that reads text only."""
        return iter(())

    def positions(self, token_ids: NDArray[np.int64], media: Sequence[MediaSpan]) -> NDArray[np.int64]:
        """Of one whole sequence: [T], or [3, T] where images are placed in time, height and width. Those of a token do
        not depend on what follows it, and behind the last image every axis goes on by one a token."""
        return np.arange(len(token_ids))

    def prepare(self, positions: int) -> None:
        """Make ready for positions below this one what `forward` may not make itself inside a CUDA graph."""
        return

    def move(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Parameters to a device and a number format; buffers keep theirs, since positions need all their digits."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(device, dtype)
        return self.to(device)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [N, V] in float32, scaled and capped as the model does it."""

    @abstractmethod
    def scores(self, hidden: Tensor, targets: Tensor, *, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
        """Log-probs of `targets[N]` and entropies [N], differentiable; logits are made for `chunk` rows at once."""

    @abstractmethod
    def weights(self, gather: Gather = keep_tensor) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, one at a time, an adapter merged; live or made on the way."""

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights that `load` takes, by checkpoint name."""
        return {name: tuple(tensor.shape) for name, tensor in self.weights()}

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy in weights of these names; all must come, and a name or shape that does not fit is an EngineError."""

    def fill(self, checkpoint: CheckpointRows, own_rows: OwnRows) -> None:
        """Read into a skeleton's weights those rows that this process has of each."""
        raise EngineError(f"{type(self).__name__} cannot be read in parts")

    def probe(self) -> None:
        """Find out, on weights that are there, what the model does; what Turnwise cannot do with it is an EngineError.
        A model that was read whole has done so."""
        return

    def follow_routers(self) -> None:
        """From now on passes may note the experts that are chosen, or say them: `shape.routers` has the routers. A
        model without any, or whose choice cannot be replaced, is an EngineError."""
        raise EngineError(f"{type(self).__name__} has no routers that choose experts")

    @abstractmethod
    def without_adapter(self) -> AbstractContextManager[None]:
        """Inside, the weights below the adapter answer: the reference policy at no cost. No adapter is an error."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """config.json and safetensors as transformers and inference servers load them, an adapter merged."""

    def save_config(self, folder: Path) -> None:
        """config.json alone, for weights that another writes."""
        raise EngineError(f"{type(self).__name__} cannot be saved from several processes")

    def adapter_weights(self, gather: Gather = keep_tensor) -> dict[str, Tensor]:
        """The factors of the adapter by the names peft gives them."""
        raise EngineError("this model has no adapter to save")

    def save_adapter(self, folder: Path, base_model: str, factors: Mapping[str, Tensor] | None = None) -> None:
        """The adapter in peft's format; `base_model` is the folder or hub id it is put on. `factors` are what
        `adapter_weights` gave, where they are not to be had here."""
        raise EngineError("this model has no adapter to save")

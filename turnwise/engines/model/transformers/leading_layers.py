"""The first layers of a transformers model with one of each kind among them: enough to try out what the model does."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from turnwise.engines.model.policy_model import LayerCache
from turnwise.engines.model.transformers.attention import FACTS, AttentionLayer

_PLAIN = (bool, int, float, str, FunctionType, type(None))
"""What a layer keeps beside its weights that may make it compute something else."""


@dataclass(frozen=True, slots=True)
class LeadingLayers:
    """`LeadingLayers.of(decoder, layers)`; None where all layers differ, or are not one list of the decoder's."""

    home: nn.Module
    name: str
    layers: nn.ModuleList
    same_as: tuple[int, ...]
    """[layers] the first one of its kind."""

    @classmethod
    def of(cls, decoder: nn.Module, layers: Sequence[nn.Module]) -> "LeadingLayers | None":
        """Those of a decoder whose layers these are."""
        if not layers:
            return None
        for home in decoder.modules():
            for name, child in home.named_children():
                if isinstance(child, nn.ModuleList) and list(child) == list(layers):
                    kinds = _kinds(layers)
                    leading = cls(home, name, child, tuple(kinds.index(kind) for kind in kinds))
                    return leading if leading.count < len(layers) else None
        return None

    @property
    def count(self) -> int:
        """How many there are."""
        return max(self.same_as) + 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, the model has no other layers."""
        setattr(self.home, self.name, nn.ModuleList(self.layers[: self.count]))
        try:
            yield
        finally:
            setattr(self.home, self.name, self.layers)

    def spread(self, decoder: nn.Module) -> tuple[LayerCache, ...] | None:
        """Inside `alone`, tell every layer what was found of the first of its kind; what all of them keep. None where
        something attends outside of the layers, or not in their order."""
        found = [
            [(path, getattr(part, FACTS)) for path, part in layer.named_modules() if hasattr(part, FACTS)]
            for layer in self.layers[: self.count]
        ]
        for facts in found:
            facts.sort(key=lambda fact: int(fact[1].number))
        numbers = [fact.number for facts in found for _, fact in facts]
        watched = sum(hasattr(module, FACTS) for module in decoder.modules())
        if numbers != list(range(watched)):
            return None
        caches: list[LayerCache] = []
        for layer, first in zip(self.layers, self.same_as, strict=True):
            for path, fact in found[first]:
                setattr(layer.get_submodule(path), FACTS, AttentionLayer(len(caches), fact.window, fact.cache))
                caches.append(fact.cache)
        return tuple(caches)


def _kinds(layers: Sequence[nn.Module]) -> list[Hashable]:
    """What makes a layer compute what it does, its weights and its own number aside."""
    plain = [_values(layer) for layer in layers]
    numbers = {
        place
        for place in plain[0]
        if all(type(values.get(place)) is int and values[place] == number for number, values in enumerate(plain))
    }
    return [frozenset((place, value) for place, value in values.items() if place not in numbers) for values in plain]


def _values(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """By module and name: its class, what is plain of it, and the shapes of its tensors."""
    values: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        values[path, "class"] = type(module)
        values |= {(path, name): value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            values[path, name] = tuple(tensor.shape)
    return values

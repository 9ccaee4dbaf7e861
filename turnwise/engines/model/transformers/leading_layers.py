"""The first layers of a transformers model with one of each kind among them: enough to try out what the model does."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from torch import nn

from turnwise.engines.model.transformers.attention import FACTS, AttentionLayer
from turnwise.engines.model.transformers.recurrent_layers import LAYER, RecurrentLayer, take_recurrent

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

    def spread(self, decoder: nn.Module) -> tuple[list[AttentionLayer], list[RecurrentLayer]] | None:
        """Inside `alone`, tell every layer what was found of the first of its kind; what attends and what recurs in all
        of them. None where something does so outside of the layers, or not in their order."""
        attends = self._spread(decoder, FACTS, lambda module, fact: setattr(module, FACTS, fact))
        recurs = self._spread(decoder, LAYER, take_recurrent)
        return None if attends is None or recurs is None else (attends, recurs)

    def _spread(self, decoder: nn.Module, key: str, take: Callable[[nn.Module, Any], None]) -> list[Any] | None:
        found = [
            [(path, getattr(part, key)) for path, part in layer.named_modules() if hasattr(part, key)]
            for layer in self.layers[: self.count]
        ]
        for facts in found:
            facts.sort(key=lambda fact: int(fact[1].number))
        if [fact.number for facts in found for _, fact in facts] != list(
            range(sum(hasattr(module, key) for module in decoder.modules()))
        ):
            return None
        spread: list[Any] = []
        for layer, first in zip(self.layers, self.same_as, strict=True):
            for path, fact in found[first]:
                spread.append(replace(fact, number=len(spread)))
                take(layer.get_submodule(path), spread[-1])
        return spread


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

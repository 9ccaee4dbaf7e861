"""A transformers model's weights under the names of its checkpoint, in and out, a layer at a time.

transformers fuses some weights in memory (the experts of a layer, say) and undoes it when it saves; names and shapes
here are always those of the files, so that whoever reads the files can take these too.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from turnwise.engines.model.checkpoint_rows import CheckpointRows, OwnRows
from turnwise.errors import EngineError

LAYER = re.compile(r"^.*?\.\d+\.")
"""What the weights of one layer have in common at the start of their names."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of a checkpoint, and the conversion that it goes into."""

    name: str
    pattern: str | None
    converter: WeightConverter | None


class CheckpointNames:
    """Both directions between the live tensors by their names in memory and those of the checkpoint."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        if getattr(model, "_weight_conversions", None) is None:
            # Not read from a checkpoint, or from one of another format: saved in the family's own way.
            mapping = get_model_conversion_mapping(model, add_legacy=False)
            model._weight_conversions = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
        self._conversions: list[WeightTransform] = model._weight_conversions
        self._known: dict[str, dict[str, tuple[int, ...]]] | None = None
        self._once: tuple[str, ...] | None = None
        """The names in memory that a checkpoint has, tied ones once."""

    def outward(
        self, tensors: dict[str, Tensor], transform: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor as in the checkpoint, tied ones once; `transform` may change each on its way."""
        named = cast(Any, _ByName(self._model, tensors))
        for group in _layers(self._untied(tensors)).values():
            ready = {name: transform(name, tensor) for name, tensor in group.items()}
            for name, tensor in revert_weight_conversion(named, ready).items():
                yield name, tensor.detach()

    def _untied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._once is None:  # tensors that are shared out over processes do not show who is tied to whom
            unsaved = self._model._keys_to_ignore_on_save or ()
            saved = {name: tensor for name, tensor in tensors.items() if name not in unsaved}
            self._once = tuple(remove_tied_weights_from_state_dict(saved, self._model))
        return {name: tensors[name] for name in self._once if name in tensors}  # some layers may be left out

    def shapes(self, tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """What the checkpoint holds, without making any of it."""
        return {name: shape for layer in self._layout(self._untied(tensors)).values() for name, shape in layer.items()}

    def _layout(self, own: dict[str, Tensor]) -> dict[str, dict[str, tuple[int, ...]]]:
        """Names and shapes in the checkpoint by layer; a model's never change."""
        if self._known is None:
            self._known, named = {}, cast(Any, _ByName(self._model, own))
            for layer, group in _layers(own).items():
                empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in group.items()}
                theirs = revert_weight_conversion(named, empty)
                self._known[layer] = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
        return self._known

    @torch.no_grad()
    def inward(
        self, tensors: dict[str, Tensor], weights: Iterable[tuple[str, Tensor]], watched: Container[str] = ()
    ) -> bool:
        """Copy in weights by their checkpoint names; a layer is held until it is complete, then converted at once.

        Returns whether any that is watched, by its name in memory, is now another.
        """
        changed = False
        own = self._untied(tensors)
        missing = {layer: dict(shapes) for layer, shapes in self._layout(own).items()}
        home = {name: layer for layer, shapes in missing.items() for name in shapes}
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights:
            layer = home.get(name, "")
            shape = missing[layer].pop(name, None) if name in home else None
            if shape is None or shape != tuple(tensor.shape):
                actual = "no weight" if shape is None else f"not {tuple(tensor.shape)} but {shape}"
                raise EngineError(f"these are not the weights of this model: {name} is {actual} here")
            waiting.setdefault(layer, {})[name] = tensor
            if not missing[layer]:
                for target, value in self._convert(waiting.pop(layer), own):
                    if target in watched and not changed:
                        changed = not torch.equal(own[target], value.to(own[target]))
                    own[target].copy_(value)
        if left := sorted(name for shapes in missing.values() for name in shapes):
            raise EngineError(f"these are not the weights of this model: {', '.join(left[:5])} are missing")
        return changed

    def _convert(self, group: dict[str, Tensor], own: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for target, sources in self._homes(group, own).items():
            yield from self._converted(target, sources, group.__getitem__, own)

    def _homes(self, names: Iterable[str], own: dict[str, Tensor]) -> dict[str, list[_Source]]:
        """From which tensors of a checkpoint those in memory are made: by the first of them where a conversion makes
        several."""
        renamings = [entry for entry in self._conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._conversions if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        homes: dict[str, list[_Source]] = {}
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, self._model.base_model_prefix, own)
            if target not in own and name in own:
                target, pattern = name, None
            converter = None if pattern is None else by_pattern[pattern]
            homes.setdefault(target, []).append(_Source(name, pattern, converter))
        return homes

    def _converted(
        self, target: str, sources: Sequence[_Source], read: Callable[[str], Tensor], own: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors in memory that these sources make, which are read now."""
        if sources[0].converter is None:
            yield target, read(sources[-1].name)
            return
        converter = deepcopy(sources[0].converter)
        for source in sources:
            converter.add_tensor(target, source.name, source.pattern, read(source.name))
        converted = converter.convert(target, model=_ByName(self._model, own), config=self._model.config)
        for full, value in converted.items():
            yield full, value[0] if isinstance(value, list) else value

    # --- of a model without numbers --------------------------------------------------------------------------------

    @classmethod
    def of_skeleton(cls, model: PreTrainedModel, names: Iterable[str]) -> tuple["CheckpointNames", list[str]]:
        """Those of a model without numbers that a checkpoint with these names is to be read into, as transformers reads
        it; and the names that it has no place for."""
        mapping = get_model_conversion_mapping(model)
        model._weight_conversions = mapping
        own = model.state_dict()
        homes = cls(model)._homes(names, own)
        model._weight_conversions = [entry for entry in mapping if entry.was_used()]
        places = cls(model)
        places._untied(own)  # as long as it shows who is tied to whom
        return places, [source.name for target, sources in homes.items() if target not in own for source in sources]

    @torch.no_grad()
    def fill(self, tensors: dict[str, Tensor], checkpoint: CheckpointRows, own_rows: OwnRows) -> list[str]:
        """Read this process's rows of these tensors by their names in memory, and return those that no tensor of the
        checkpoint is for. What a conversion makes of several tensors is made whole first, one at a time."""
        homes = {name: sources for name, sources in self._homes(checkpoint.shapes, tensors).items() if name in tensors}
        tied, filled = self._model.all_tied_weights_keys, set[str]()
        for target in sorted(homes, key=tied.__contains__):
            for name, value in self._read_home(target, homes[target], tensors, checkpoint, own_rows):
                own, _ = own_rows(tensors[name])
                twin = tied.get(name)
                if twin in filled and not torch.equal(value.to(own), own):
                    raise EngineError(
                        f"{checkpoint.folder}: {name} differs from {twin}, and config.json ties them: set "
                        "tie_word_embeddings to false to use it"
                    )
                own.copy_(value)
                filled.add(name)
        missing = self._untied(tensors).keys() - filled
        return sorted(name for name in missing if not any(tied.get(other) == name for other in filled))

    def _read_home(
        self,
        target: str,
        sources: Sequence[_Source],
        tensors: dict[str, Tensor],
        checkpoint: CheckpointRows,
        own_rows: OwnRows,
    ) -> Iterator[tuple[str, Tensor]]:
        """This process's rows of the tensors that these sources make, by their names in memory."""
        own, first = own_rows(tensors[target])
        if sources[0].converter is None and own.dim():
            name = sources[-1].name
            _check_shape(checkpoint, target, checkpoint.shapes[name], tensors[target])
            yield target, checkpoint.rows(name, first, len(own))
            return
        dtype = own.dtype
        if (stacked := self._stacked(target, sources, tensors, checkpoint, own_rows)) is not None:
            if not len(own):
                yield target, own
                return
            yield from self._converted(target, stacked, lambda name: checkpoint.whole(name).to(dtype), tensors)
            return
        whole = self._converted(target, sources, lambda name: checkpoint.whole(name).to(dtype), tensors)
        for name, value in whole:
            _check_shape(checkpoint, name, tuple(value.shape), tensors[name])
            own, first = own_rows(tensors[name])
            yield name, value[first : first + len(own)] if own.dim() else value

    def _stacked(
        self,
        target: str,
        sources: Sequence[_Source],
        tensors: dict[str, Tensor],
        checkpoint: CheckpointRows,
        own_rows: OwnRows,
    ) -> list[_Source] | None:
        """Of the experts of a layer, which a conversion stacks, those that this process has; None where a conversion
        does anything else, which is tried on the meta device."""
        whole = tuple(tensors[target].shape)
        own, first = own_rows(tensors[target])
        by_pattern: dict[str | None, list[_Source]] = {}
        for source in sources:
            by_pattern.setdefault(source.pattern, []).append(source)
        if not whole or any(len(stack) != whole[0] for stack in by_pattern.values()):
            return None
        chosen = {source.name for stack in by_pattern.values() for source in stack[first : first + len(own)]}
        kept = [source for source in sources if source.name in chosen]

        def empty(name: str) -> Tensor:
            return torch.empty(checkpoint.shapes[name], dtype=own.dtype, device="meta")

        for some, rows in ((sources, whole[0]), (kept, len(own))):
            made = dict(self._converted(target, some, empty, tensors)) if rows else {}
            if rows and {name: tuple(value.shape) for name, value in made.items()} != {target: (rows, *whole[1:])}:
                return None
        return kept


def _check_shape(checkpoint: CheckpointRows, name: str, shape: tuple[int, ...], tensor: Tensor) -> None:
    if shape != tuple(tensor.shape):
        raise EngineError(f"{checkpoint.folder}: its weights have other shapes than config.json says ({name})")


class _ByName:
    """A model as conversions ask it for the shapes of its parameters: by the names that they had before an adapter was
    put around them."""

    def __init__(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        self._model, self._tensors = model, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, target: str) -> Tensor:
        return self._tensors[target]


def _layers(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of each layer together; those of no layer stand by themselves."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = LAYER.match(name)
        groups.setdefault(match.group() if match else "", {})[name] = tensor
    return groups

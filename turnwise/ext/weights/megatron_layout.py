"""How Megatron-core cuts a model into a grid of ranks: which tensors a part has, heads by group, gate beside up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import ConfigError, EngineError, StorageError
from turnwise.ext.weights.expected_tensors import Expected
from turnwise.ext.weights.fused_tensors import shapes_apart
from turnwise.ext.weights.lazy_tensor import Stored, same_bits
from turnwise.ext.weights.megatron_names import FAMILIES, HEAD, OUTPUT, Cut, NameRow, Stage
from turnwise.ext.weights.names import listed

LAYER = "decoder.layers."


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Attention heads as Megatron stores them: `HeadGroups(2, [64, 32, 32])`, rows of q, k and v of one group."""

    groups: int
    rows: list[int]


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Megatron's name and the Hugging Face names: `TensorSlot(FINAL_NORM, Cut.copies, ("model.norm.weight",))`."""

    name: str
    cut: Cut
    sources: tuple[str, ...]
    heads: HeadGroups | None = None


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """What of a model decides how its tensors lie in Megatron; its names are those of files, fused ones apart."""

    prefix: str
    """Before Megatron's names of the decoder."""
    rows: tuple[NameRow, ...]
    shapes: Mapping[str, tuple[int, ...]]
    expected: Expected
    layers: int
    experts: int
    heads: HeadGroups
    tower_heads: HeadGroups | None
    embedding: str

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return HEAD not in self.shapes

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        return self.shapes[self.embedding][0]

    def part(self, first: int, layers: int, *, begins: bool, ends: bool) -> Iterator[TensorSlot]:
        """The tensors of a part of the grid that has `layers` layers from `first` on."""
        for row in self.rows:
            match row.stage:
                case Stage.own:
                    numbers = [(index, first + index) for index in range(layers)]
                case Stage.first if begins:
                    numbers = list(enumerate(range(len(self.shapes)))) if "*" in row.theirs else [(0, 0)]
                case Stage.last if ends:
                    numbers = [(0, 0)]
                case _:
                    numbers = []
            for theirs, ours in numbers:
                found = list(self._row(row, theirs, ours))
                if not found and row.stage is Stage.first:
                    break  # a tower's blocks end
                yield from found
        # Where the embedding is tied and lies on another stage, the last one has a copy to make logits with.
        if ends and (not self.tied or not begins):
            yield TensorSlot(self.prefix + OUTPUT, Cut.words, (self.embedding if self.tied else HEAD,))

    def _row(self, row: NameRow, theirs: int, ours: int) -> Iterator[TensorSlot]:
        near = row.beside.replace("*", str(ours))
        if near and near not in self.shapes:
            return
        heads = (self.heads if row.theirs.startswith(f"{self.prefix}{LAYER}") else self.tower_heads) or self.heads
        for expert in range(self.experts) if "#" in row.theirs else (0,):
            names = tuple(name.replace("*", str(ours)).replace("#", str(expert)) for name in row.ours)
            if all(name in self.shapes for name in names):
                name = row.theirs.replace("*", str(theirs)).replace("#", str(expert))
                yield TensorSlot(name, row.cut, names, heads if row.cut is Cut.groups else None)

    def whole(self) -> list[TensorSlot]:
        """Every tensor of the model, as one rank would hold it."""
        return list(self.part(0, self.layers, begins=True, ends=True))


def megatron_model(expected: Expected, where: str) -> MegatronModel:
    """The layout of a model; one of another family, or with a tensor that has no place, is refused by name."""
    config: Any = expected.config if expected.model is None else expected.model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise EngineError(
            f"{where}: Megatron's layout is known here for {', '.join(FAMILIES)}, and this model is {config.model_type}"
        )
    shapes = shapes_apart(expected.shapes)
    start = f"{family.ours}layers."
    layers = len({name[len(start) :].partition(".")[0] for name in shapes if name.startswith(start)})
    model = MegatronModel(
        family.theirs,
        family.rows(),
        shapes,
        expected,
        layers,
        _experts(shapes, start),
        _decoder_heads(expected),
        _tower_heads(config) if family.tower else None,
        f"{family.ours}embed_tokens.weight",
    )
    placed = {source for slot in model.whole() for source in slot.sources}
    if unknown := sorted(shapes.keys() - placed):
        raise EngineError(f"{where} has {listed(unknown)}, which have no place in Megatron's layout known here")
    return model


def _experts(shapes: Mapping[str, tuple[int, ...]], start: str) -> int:
    sparse = (name.partition(".mlp.experts.")[2] for name in shapes if name.startswith(start))
    return max((int(rest.partition(".")[0]) + 1 for rest in sparse if rest), default=0)


def _decoder_heads(expected: Expected) -> HeadGroups:
    if expected.config is not None:
        heads, groups, size = expected.config.num_heads, expected.config.num_kv_heads, expected.config.head_dim
    else:
        assert expected.model is not None
        config = expected.model.config.get_text_config()
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return HeadGroups(groups, [heads // groups * size, size, size])


def _tower_heads(config: Any) -> HeadGroups:
    tower = config.vision_config
    size = getattr(tower, "embed_dim", tower.hidden_size) // tower.num_heads
    return HeadGroups(tower.num_heads, [size, size, size])


@dataclass(frozen=True, slots=True)
class ParallelGrid:
    """Ranks that share each layer, stages of layers, and turns of each stage: `ParallelGrid(tensor=2, pipeline=2)`."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(turn, stage) in the order in which a token passes them."""
        return ((turn, stage) for turn in range(self.virtual) for stage in range(self.pipeline))


def check_grid(grid: ParallelGrid, model: MegatronModel) -> None:
    """Refuse a grid that the model cannot be cut into."""
    for slot in model.whole():
        shape = model.shapes[slot.sources[0]]
        axis = 1 if slot.cut is Cut.columns else 0
        what, number = {
            Cut.groups: ("key/value heads", slot.heads.groups if slot.heads else 1),
            Cut.halves: ("rows of the gate", shape[0]),
            Cut.rows: ("rows", shape[0]),
            Cut.columns: ("columns", shape[min(axis, len(shape) - 1)]),
        }.get(slot.cut, ("", 0))
        if number % grid.tensor:
            raise ConfigError(
                f"--tp {grid.tensor}: {number} {what} cannot be shared evenly ({slot.name}); take a divisor of {number}"
            )
    parts = grid.pipeline * grid.virtual
    if model.layers % parts:
        raise ConfigError(
            f"--pp {grid.pipeline} --vpp {grid.virtual}: {model.layers} layers cannot be shared evenly by {parts} parts"
        )
    if grid.virtual > 1 and grid.pipeline == 1:
        raise ConfigError(f"--vpp {grid.virtual}: turns need several stages, and --pp is 1")


# --- from the ranks of a tensor-parallel group ----------------------------------------------------------------------


def joined(slot: TensorSlot, ranks: Sequence[Stored], model: MegatronModel) -> dict[str, Stored]:
    """The Hugging Face tensors of a slot, from what each rank of the group holds."""
    shape, dtype = ranks[0].shape, ranks[0].dtype
    if any(rank.shape != shape or rank.dtype != dtype for rank in ranks):
        raise StorageError(f"{slot.name} is not of one shape and number format on all {len(ranks)} ranks")
    if slot.cut is not Cut.copies and len(shape) != (1 if slot.name.endswith("bias") else 2):
        raise StorageError(f"{slot.name} has {len(shape)} axes, which is not expected")
    many = len(ranks)
    match slot.cut:
        case Cut.copies:
            return {slot.sources[0]: Stored(dtype, shape, lambda: _copy(slot.name, ranks))}
        case Cut.columns:
            wide = (shape[0], shape[1] * many)
            return {slot.sources[0]: Stored(dtype, wide, lambda: torch.cat([rank.read() for rank in ranks], 1))}
        case Cut.words:
            return {slot.sources[0]: _vocabulary(slot, ranks, model.words)}
        case Cut.rows:
            tall = (shape[0] * many, *shape[1:])
            return {slot.sources[0]: Stored(dtype, tall, lambda: torch.cat([rank.read() for rank in ranks]))}
        case Cut.halves:
            if shape[0] % 2:
                raise StorageError(f"{slot.name} has {shape[0]} rows, so they are not a gate and an equal up matrix")
            half = (shape[0] // 2 * many, *shape[1:])
            return {
                source: Stored(dtype, half, _rows(ranks, lambda rank, side=side: rank.chunk(2)[side]))  # type: ignore[misc]
                for side, source in enumerate(slot.sources)
            }
    return _heads(slot, ranks)


def _copy(name: str, ranks: Sequence[Stored]) -> Tensor:
    first = ranks[0].read()
    for index, rank in enumerate(ranks[1:], 1):
        if not same_bits(first, rank.read()):
            raise StorageError(
                f"{name} differs between the tensor-parallel ranks 0 and {index}, where it must be the same"
            )
    return first


def _rows(ranks: Sequence[Stored], part: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    return lambda: torch.cat([part(rank.read()) for rank in ranks])


def _vocabulary(slot: TensorSlot, ranks: Sequence[Stored], words: int) -> Stored:
    """Rows past the vocabulary, which pad it to a size that the ranks can share, are cut off."""
    rows, hidden = ranks[0].shape
    if rows * len(ranks) < words:
        raise StorageError(f"{slot.name} has {rows * len(ranks)} rows on all ranks, config.json says {words}")
    return Stored(ranks[0].dtype, (words, hidden), lambda: torch.cat([rank.read() for rank in ranks])[:words])


def _heads(slot: TensorSlot, ranks: Sequence[Stored]) -> dict[str, Stored]:
    assert slot.heads is not None
    all_groups, sizes = slot.heads.groups, slot.heads.rows
    groups = all_groups // len(ranks)
    shape = ranks[0].shape
    if all_groups % len(ranks) or shape[0] != groups * sum(sizes):
        raise StorageError(
            f"{slot.name} has {shape[0]} rows on each of {len(ranks)} ranks; config.json says {all_groups} "
            f"groups of {sum(sizes)} rows in all"
        )

    def part(rank: Tensor, which: int) -> Tensor:
        by_group = rank.view(groups, sum(sizes), *shape[1:])
        return torch.split(by_group, sizes, 1)[which].reshape(groups * sizes[which], *shape[1:])

    return {
        source: Stored(
            ranks[0].dtype,
            (all_groups * sizes[which], *shape[1:]),
            _rows(ranks, lambda rank, which=which: part(rank, which)),  # type: ignore[misc]
        )
        for which, source in enumerate(slot.sources)
    }


# --- to a rank ------------------------------------------------------------------------------------------------------


def share(slot: TensorSlot, tensors: Mapping[str, Stored], rank: int, ranks: int, multiple: int) -> Tensor:
    """What one rank of a group holds of a slot, as a copy; its share of a vocabulary is padded to `multiple` rows."""
    sources = [tensors[name].read() for name in slot.sources]
    match slot.cut:
        case Cut.copies:
            part = sources[0]
        case Cut.columns:
            part = sources[0].chunk(ranks, 1)[rank]
        case Cut.halves:
            part = torch.cat([source.chunk(ranks)[rank] for source in sources])
        case Cut.groups:
            assert slot.heads is not None
            by_group = [
                source.view(slot.heads.groups, rows, *source.shape[1:]).chunk(ranks)[rank]
                for source, rows in zip(sources, slot.heads.rows, strict=True)
            ]
            part = torch.cat(by_group, 1).flatten(0, 1)
        case Cut.rows:
            part = sources[0].chunk(ranks)[rank]
        case Cut.words:
            words, hidden = sources[0].shape
            rows = -(-words // (multiple * ranks)) * multiple
            part = torch.zeros(rows, hidden, dtype=sources[0].dtype)
            own = sources[0][rank * rows : (rank + 1) * rows]
            part[: len(own)] = own
    return part.clone(memory_format=torch.contiguous_format)


def part_of(model: MegatronModel, grid: ParallelGrid, turn: int, stage: int) -> tuple[int, int]:
    """The first layer of a part of an even grid, and how many it has."""
    layers = model.layers // (grid.pipeline * grid.virtual)
    return (turn * grid.pipeline + stage) * layers, layers

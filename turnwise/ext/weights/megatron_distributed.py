"""Megatron-core's distributed checkpoints (`torch_dist`): whole tensors, the layers of one stacked; read and written.

Ranks of any grid load them: the format knows of no split, each rank takes the boxes that it needs.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from turnwise.errors import StorageError
from turnwise.ext.weights.expected_tensors import check_numbers, repeated
from turnwise.ext.weights.fused_tensors import apart, together
from turnwise.ext.weights.lazy_tensor import Stored, picked
from turnwise.ext.weights.megatron import LATEST, VERSION, Part, joined_part, usual_name
from turnwise.ext.weights.megatron_layout import MegatronModel, TensorSlot, share
from turnwise.ext.weights.megatron_names import HEAD, OUTPUT, Cut
from turnwise.ext.weights.names import listed

OWN = re.compile(r"(?:language_model\.)?(?:decoder|embedding|output_layer)\.|vision_model\.")
INDEXED = re.compile(r"(?P<before>(?:\w+\.)?decoder\.(?:layers|deepstack_merger_list)\.)(?P<layer>\d+)\.(?P<rest>.+)")
EXPERT = re.compile(r"mlp\.experts\.(?P<matrix>linear_fc[12]\.weight)(?P<number>\d+)")


def is_megatron(names: Iterable[str]) -> bool:
    """Whether a distributed checkpoint holds a model of Megatron's."""
    return any(re.match(r"(?:language_model\.)?decoder\.layers\.", name) for name in names)


@dataclass(frozen=True, slots=True)
class StackedPlace:
    """Where a slot lies: `StackedPlace("decoder.layers.mlp.linear_fc2.weight", (3,))` is that of layer 3."""

    name: str
    index: tuple[int, ...] = ()


def places(name: str) -> tuple[StackedPlace, StackedPlace]:
    """A slot's place where layers are stacked, and where each has names of its own; experts are stacked in both."""
    match = INDEXED.fullmatch(name)
    if match is None:
        return StackedPlace(name), StackedPlace(name)
    layer, rest, expert = int(match["layer"]), match["rest"], EXPERT.fullmatch(match["rest"])
    number: tuple[int, ...] = ()
    if expert is not None:
        rest, number = f"mlp.experts.experts.{expert['matrix']}", (int(expert["number"]),)
    return (
        StackedPlace(f"{match['before']}{rest}", (layer, *number)),
        StackedPlace(f"{match['before']}{layer}.{rest}", number),
    )


# --- read -----------------------------------------------------------------------------------------------------------


def read_distributed_megatron(tensors: Mapping[str, Stored], model: MegatronModel, where: str) -> dict[str, Stored]:
    """The Hugging Face tensors of Megatron's distributed format."""
    part = distributed_part(tensors, model, where)
    joined, _ = joined_part([part], model, 0, where, begins=True, ends=True)
    if model.tied and HEAD in joined:
        joined[model.embedding] = repeated(joined.pop(HEAD), joined[model.embedding], HEAD, model.embedding, where)
    return together(joined, model.expected.shapes)


def distributed_part(tensors: Mapping[str, Stored], model: MegatronModel, where: str) -> Part:
    """That format as the part of a grid of one rank; an optimiser and random states are left."""
    own: Part = {}
    for name, stored in tensors.items():
        if OWN.match(name) and "_extra_state" not in name:
            own[usual_name(name, tensors)] = stored
    for name in [name for name in own if name.endswith("_w")]:  # gate and up may be set apart
        gate, up = own.pop(name), own.pop(f"{name[:-1]}v", None)
        if up is None or up.shape != gate.shape:
            raise StorageError(f"{where}: {name} is without its other half")
        axis = len(gate.shape) - (1 if "bias" in name else 2)
        whole = tuple(size * 2 if at == axis else size for at, size in enumerate(gate.shape))
        own[name[:-2]] = Stored(gate.dtype, whole, functools.partial(_stacked, gate, up, axis))
    part: Part = {}
    used: set[str] = set()
    slots = model.whole()
    counts = _counts(slots)
    for slot in [*slots, TensorSlot(model.prefix + OUTPUT, Cut.words, ())]:
        for place in (StackedPlace(slot.name), *places(slot.name)):
            if place.name not in own:
                continue
            stored = own[place.name]
            if place.index and stored.shape[: len(place.index)] != counts[place.name]:
                said = f"{counts[place.name]} in front" if len(place.index) > 1 else f"{counts[place.name][0]} layers"
                raise StorageError(f"{where}: {place.name} is {stored.shape}, config.json says {said}")
            for at in place.index:
                stored = picked(place.name, stored, at)
            part[slot.name] = stored
            used.add(place.name)
            break
    if surplus := sorted(own.keys() - used):
        raise StorageError(f"{where} holds {listed(surplus)}, which this model has no place for")
    return part


def _counts(slots: Iterable[TensorSlot]) -> dict[str, tuple[int, ...]]:
    """The axes in front of each stacked tensor: how many layers, how many experts."""
    counts: dict[str, tuple[int, ...]] = {}
    for slot in slots:
        for place in places(slot.name):
            before = counts.get(place.name, (0,) * len(place.index))
            counts[place.name] = tuple(max(have, at + 1) for have, at in zip(before, place.index, strict=True))
    return counts


def _stacked(gate: Stored, up: Stored, axis: int) -> Tensor:
    return torch.cat([gate.read(), up.read()], axis)


# --- write ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Box:
    """A slot as a box of the tensor it lies in."""

    name: str
    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    content: Callable[[], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype


def write_distributed(
    folder: Path,
    tensors: Mapping[str, Stored],
    model: MegatronModel,
    *,
    dtype: torch.dtype | None,
    multiple: int,
    advance: Callable[[int], None],
) -> None:
    """`release/`, as Megatron-core's `dist_checkpointing.load` reads it; one tensor of a layer is in memory."""
    boxes = _boxes(apart(tensors), model, dtype, multiple)
    target = folder / "release"
    target.mkdir(parents=True)
    writer = FileSystemWriter(target, thread_count=1, per_thread_copy_ahead=0)
    planner = _Planner(boxes, advance)
    writer.set_up_storage_writer(is_coordinator=True)
    own = writer.prepare_local_plan(planner.create_local_plan())
    plans, head = planner.create_global_plan([own])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(head, [writer.write_data(plan, planner).wait()])
    formats = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {f"{name}_version": 1 for name in formats}
    (target / "metadata.json").write_text(json.dumps(formats | versions), encoding="utf-8")
    torch.save({"checkpoint_version": VERSION, "iteration": 0}, target / "common.pt")
    (folder / LATEST).write_text("release\n", encoding="utf-8")


def _boxes(
    plain: Mapping[str, Stored], model: MegatronModel, dtype: torch.dtype | None, multiple: int
) -> dict[MetadataIndex, _Box]:
    slots = model.whole()
    counts = _counts(slots)
    stacked = {place.name: counts[place.name] for slot in slots for place in places(slot.name)[:1]}
    held: dict[str, int] = {}
    for slot in slots:
        held[places(slot.name)[0].name] = held.get(places(slot.name)[0].name, 0) + 1
    # Megatron stacks the layers of a decoder whose layers are alike, and names those of any other one by one.
    uneven = {_block(name) for name, number in held.items() if number != math.prod(stacked[name])}
    boxes: dict[MetadataIndex, _Box] = {}
    for slot in slots:
        both = places(slot.name)
        place = both[1] if _block(both[0].name) in uneven else both[0]
        read = functools.partial(_content, slot, plain, dtype, multiple)
        source = plain[slot.sources[0]]
        shape = _shape(slot, [plain[name].shape for name in slot.sources], multiple)
        front = counts[place.name]
        offsets = (*place.index, *(0 for _ in shape))
        kind = dtype if dtype is not None else source.dtype
        box = _Box(place.name, offsets, (*front, *shape), read, (*(1 for _ in front), *shape), kind)
        boxes[MetadataIndex(place.name, torch.Size(offsets))] = box
    return boxes


def _block(name: str) -> str:
    return name.partition(".layers.")[0]


def _shape(slot: TensorSlot, shapes: list[tuple[int, ...]], multiple: int) -> tuple[int, ...]:
    first = shapes[0]
    if slot.cut is Cut.words:
        return (-(-first[0] // multiple) * multiple, *first[1:])
    return (sum(shape[0] for shape in shapes), *first[1:])


def _content(slot: TensorSlot, plain: Mapping[str, Stored], dtype: torch.dtype | None, multiple: int) -> Tensor:
    own = share(slot, plain, 0, 1, multiple)
    changed = own if dtype is None else own.to(dtype)
    check_numbers(slot.name, changed, own.dtype, "the checkpoint")
    return changed


class _Planner(DefaultSavePlanner):
    """Gives torch's writer one box after the other, each made when it is written."""

    def __init__(self, boxes: Mapping[MetadataIndex, _Box], advance: Callable[[int], None]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes, self._advance = boxes, advance

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, box in self._boxes.items():
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape))
            written = TensorWriteData(chunk, TensorProperties(dtype=box.dtype), torch.Size(box.whole))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        box = self._boxes[write_item.index]
        tensor = box.content().view(box.shape)
        self._advance(tensor.nbytes)
        return tensor

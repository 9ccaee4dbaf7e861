"""The shards that verl's FSDP workers write, `model_world_size_W_rank_R.pt`, as whole tensors by their names."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from turnwise.errors import StorageError
from turnwise.ext.weights.lazy_tensor import Stored, TensorPiece, assembled
from turnwise.ext.weights.names import listed, plain_name
from turnwise.ext.weights.pickles import ListedRecord, PlacedRecord, Record, ShardedRecord, counts, read_pickle

SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
CONFIG = "fsdp_config.json"


def is_fsdp(folder: Path) -> bool:
    """Whether verl's shards lie here."""
    return any(SHARD.fullmatch(path.name) for path in folder.iterdir())


def shard_files(folder: Path) -> list[Path]:
    """The shards by rank; those that are missing, or too many, are named."""
    files = {
        (int(match[1]), int(match[2])): match[0] for path in folder.iterdir() if (match := SHARD.fullmatch(path.name))
    }
    sizes = sorted({size for size, _ in files})
    world = _world_size(folder)
    if world is None:
        if len(sizes) > 1:
            raise StorageError(
                f"{folder} holds shards of {' and of '.join(map(str, sizes))} ranks; keep those of one save"
            )
        world = sizes[0]
    missing = [f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world) if (world, rank) not in files]
    if missing:
        raise StorageError(f"{folder} lacks {listed(missing)}: {world} ranks saved it")
    surplus = [name for (size, rank), name in sorted(files.items()) if size != world or rank >= world]
    if surplus:
        raise StorageError(f"{folder} holds {listed(surplus)} beside the shards of its {world} ranks; move that away")
    return [folder / files[world, rank] for rank in range(world)]


def _world_size(folder: Path) -> int | None:
    """As fsdp_config.json says it; early versions of verl wrote none."""
    path = folder / CONFIG
    if not path.exists():
        return None
    try:
        world = json.loads(path.read_text(encoding="utf-8"))["world_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{path} cannot be read: {error!r}") from error
    if type(world) is not int or not 0 < world < 1_000_000:
        raise StorageError(f"{path}: world_size must be a positive integer, found {world!r}")
    return world


def read_fsdp(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """Every tensor of the shards; the model's `shapes` tell whether one that is no DTensor is whole on each rank."""
    files = shard_files(folder)
    shards = [_state_dict(path) for path in files]
    names = list(shards[0])
    for path, shard in zip(files, shards, strict=True):
        if odd := sorted(shard.keys() ^ set(names)):
            raise StorageError(
                f"{files[0].name} and {path.name} hold other tensors: {listed(odd)} is in one of them only"
            )
    tensors: dict[str, Stored] = {}
    for name in names:
        held = [(path.name, shard[name]) for path, shard in zip(files, shards, strict=True)]
        plain = plain_name(name)
        if plain in tensors:
            raise StorageError(f"{folder}: {plain} stands there twice, once as {name}")
        tensors[plain] = _whole(name, held, shapes.get(plain))
    return tensors


def _state_dict(path: Path) -> dict[str, Any]:
    state = read_pickle(path)
    if not isinstance(state, dict) or not state or not all(isinstance(name, str) for name in state):
        raise StorageError(f"{path} holds no table of tensors by name")
    if odd := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise StorageError(f"{path}: {odd[0]} is not a tensor")
    return state


def _whole(name: str, held: list[tuple[str, Any]], wanted: tuple[int, ...] | None) -> Stored:
    kinds = {type(value) if isinstance(value, ShardedRecord) else Tensor for _, value in held}
    shapes = {tuple(value.shape) for _, value in held}
    if len(kinds) > 1 or (len(shapes) > 1 and kinds != {Tensor}):
        raise StorageError(f"{name} is not the same kind of tensor in {held[0][0]} and in the others")
    first = held[0][1]
    if kinds == {PlacedRecord}:
        return assembled(name, first.dtype, tuple(first.shape), _placed(name, held))
    if kinds == {ListedRecord}:
        return assembled(
            name, first.dtype, tuple(first.shape), [p for file, value in held for p in _listed_in(value, file)]
        )
    return _unplaced(name, held, wanted)


def _unplaced(name: str, held: list[tuple[str, Tensor]], wanted: tuple[int, ...] | None) -> Stored:
    """Tensors without a word of how they are sharded: whole on every rank, or rows of it where they are too few."""
    first = held[0][1]
    rows = [value.shape[0] if value.dim() else 0 for _, value in held]
    if wanted is not None and tuple(first.shape) != wanted and first.dim() and sum(rows) == wanted[0]:
        starts = [sum(rows[:rank]) for rank in range(len(rows))]
        pieces = [
            TensorPiece((start, *(0 for _ in wanted[1:])), Stored.of(value), file)
            for start, (file, value) in zip(starts, held, strict=True)
        ]
        return assembled(name, first.dtype, wanted, pieces)
    origin = tuple(0 for _ in first.shape)
    return assembled(
        name, first.dtype, tuple(first.shape), [TensorPiece(origin, Stored.of(value), file) for file, value in held]
    )


# --- DTensor --------------------------------------------------------------------------------------------------------


def _placed(name: str, held: list[tuple[str, PlacedRecord]]) -> list[TensorPiece]:
    """The boxes of the ranks, from where each stands on the mesh of devices and how the mesh shares the tensor."""
    parts = [(file, value, *_placement(name, value, file)) for file, value in held]
    axes = len(parts[0][3])
    for file, _, placements, coordinate in parts:
        if len(coordinate) != axes or len(placements) != axes:
            raise StorageError(f"{file}: {name} lies on another mesh than in {held[0][0]}")
    sizes = [1 + max(coordinate[axis] for *_, coordinate in parts) for axis in range(axes)]
    pieces: list[TensorPiece] = []
    for file, value, placements, coordinate in parts:
        local = _attributes(value.said).get("_local_tensor")
        if not isinstance(local, Tensor) or isinstance(local, ShardedRecord):
            raise StorageError(f"{file}: {name} has no part of this rank")
        offsets, lengths = _box(tuple(value.shape), placements, coordinate, sizes, f"{file}: {name}")
        if tuple(local.shape) != lengths and math.prod(lengths) + local.numel():
            raise StorageError(f"{file}: {name} has {tuple(local.shape)} of {tuple(value.shape)}, expected {lengths}")
        pieces.append(TensorPiece(offsets, Stored.of(local), file))
    return pieces


def _attributes(state: Any) -> dict[str, Any]:
    record = Record()
    record.state = state
    return record.fields()


def _placement(name: str, value: PlacedRecord, file: str) -> tuple[tuple[Record, ...], tuple[int, ...]]:
    """How each axis of the mesh shares the tensor, and where this rank stands on them."""
    spec = _attributes(value.said).get("_spec")
    fields = spec.fields() if isinstance(spec, Record) else {}
    mesh = fields.get("mesh", fields.get("device_mesh"))
    coordinate = counts(mesh.fields().get("_coordinate_on_dim")) if isinstance(mesh, Record) else None
    placements = fields.get("placements")
    if (
        coordinate is None
        or not isinstance(placements, list | tuple)
        or not all(isinstance(each, Record) for each in placements)
    ):
        raise StorageError(f"{file}: {name} does not say how it is sharded")
    return tuple(placements), coordinate


def _box(
    shape: tuple[int, ...], placements: tuple[Record, ...], coordinate: tuple[int, ...], sizes: list[int], where: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The part of one rank: an axis cuts what the axes before it left; a strided one comes after all others."""
    starts, lengths = [0] * len(shape), list(shape)
    for axis in sorted(range(len(sizes)), key=lambda axis: placements[axis].kind == "_StridedShard"):
        kind = placements[axis].kind
        if kind == "Replicate":
            continue
        dim = placements[axis].fields().get("dim", *placements[axis].args[:1])
        if kind not in ("Shard", "_StridedShard") or type(dim) is not int or not -len(shape) <= dim < len(shape):
            raise StorageError(f"{where} is {kind} over the ranks, which is not put together; Shard and Replicate are")
        step = -(-lengths[dim] // sizes[axis])
        begin = min(step * coordinate[axis], lengths[dim])
        starts[dim] += begin
        lengths[dim] = min(step, lengths[dim] - begin)
    return tuple(starts), tuple(lengths)


# --- ShardedTensor --------------------------------------------------------------------------------------------------


def _listed_in(value: ListedRecord, file: str) -> list[TensorPiece]:
    """The shards that a rank holds, each with its place."""
    shards = value.said[0] if isinstance(value.said, tuple) and value.said else None
    pieces: list[TensorPiece] = []
    for shard in shards if isinstance(shards, list) else ():
        fields = shard.fields() if isinstance(shard, Record) else {}
        where = fields.get("metadata")
        offsets = counts(where.fields().get("shard_offsets")) if isinstance(where, Record) else None
        local = fields.get("tensor")
        if not isinstance(local, Tensor) or isinstance(local, ShardedRecord) or offsets is None:
            raise StorageError(f"{file} holds a shard that does not say where it belongs")
        pieces.append(TensorPiece(offsets, Stored.of(local), file))
    return pieces

"""Distributed checkpoints of torch (`.metadata`, `*.distcp`), read without its unpickler and without ranks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import StorageError
from turnwise.weights.names import listed
from turnwise.weights.pickles import Record, counts, read_head, read_part
from turnwise.weights.stored import Piece, Stored, assembled

HEAD = ".metadata"


def is_distributed(folder: Path) -> bool:
    """Whether a distributed checkpoint lies here."""
    return (folder / HEAD).is_file()


def read_distributed(folder: Path) -> dict[str, Stored]:
    """Every tensor by its name; what else the checkpoint holds (steps, random states) is passed over."""
    head = read_head(folder / HEAD).fields()
    tensors, places = head.get("state_dict_metadata"), head.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        raise StorageError(f"{folder / HEAD} lists no tensors")
    by_name: dict[str, list[tuple[Any, Record]]] = {}
    for index, place in places.items():
        if not isinstance(index, Record) or not isinstance(place, Record):
            raise StorageError(f"{folder / HEAD} lists what is no part of a checkpoint")
        by_name.setdefault(str(index.fields().get("fqn")), []).append((index.fields().get("offset"), place))
    files = {str(place.fields().get("relative_path")) for held in by_name.values() for _, place in held}
    if outside := sorted(name for name in files if Path(name).name != name):
        raise StorageError(f"{folder / HEAD} names {outside[0]!r}, which is not a file beside it")
    if missing := sorted(name for name in files if not (folder / name).is_file()):
        raise StorageError(f"{folder} lacks {listed(missing)}")
    return {
        name: _tensor(folder, name, about, by_name.get(name, []))
        for name, about in tensors.items()
        if isinstance(about, Record) and about.kind == "TensorStorageMetadata"
    }


def _tensor(folder: Path, name: str, about: Record, held: list[tuple[Any, Record]]) -> Stored:
    known = about.fields()
    shape, chunks, dtype = counts(known.get("size")), known.get("chunks"), _number_format(known.get("properties"))
    if (
        shape is None
        or not isinstance(chunks, list)
        or not all(isinstance(each, Record) for each in chunks)
        or not dtype
    ):
        raise StorageError(f"{folder / HEAD} does not say what {name} is")
    sizes = {counts(chunk.fields().get("offsets")): counts(chunk.fields().get("sizes")) for chunk in chunks}
    pieces: list[Piece] = []
    for offset, place in held:
        at = counts(offset) if offset is not None else tuple(0 for _ in shape)
        size = sizes.get(at)
        if at is None or size is None:
            raise StorageError(f"{folder / HEAD}: {name} has a part at {at}, and no chunk begins there")
        pieces.append(Piece(at, _chunk(folder, name, dtype, size, place), str(place.fields().get("relative_path"))))
    return assembled(name, dtype, shape, pieces)


def _number_format(properties: Any) -> torch.dtype | None:
    if not isinstance(properties, Record):
        return None
    said = properties.state
    found = said[0] if isinstance(said, tuple) and said else properties.fields().get("dtype")
    return found if isinstance(found, torch.dtype) else None


def _chunk(folder: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...], place: Record) -> Stored:
    known = place.fields()
    start, length, path = known.get("offset"), known.get("length"), folder / str(known.get("relative_path"))
    if type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise StorageError(f"{folder / HEAD} does not say where in {path.name} {name} lies")
    if known.get("transform_descriptors"):
        raise StorageError(f"{path}: {name} is stored in a packed form, which is not read; save without transforms")
    if path.stat().st_size < start + length:
        raise StorageError(f"{path} ends at {path.stat().st_size} bytes, before {name} at {start} does")

    def read() -> Tensor:
        with path.open("rb") as file:
            found = read_part(file, start, length, f"{path}: {name}")
        if not isinstance(found, Tensor) or found.dtype != dtype or tuple(found.shape) != shape:
            raise StorageError(f"{path}: {name} is not the {shape} {dtype} that {HEAD} lists")
        return found

    return Stored(dtype, shape, read)

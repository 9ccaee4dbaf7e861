"""Distributed checkpoints of torch (`.metadata`, `*.distcp`), read without its unpickler and without ranks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import StorageError
from turnwise.ext.weights.lazy_tensor import Stored, TensorPiece, assembled
from turnwise.ext.weights.names import listed
from turnwise.ext.weights.pickles import Record, counts, read_head, read_part

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
    for index, entry in places.items():
        if not isinstance(index, Record) or not isinstance(entry, Record):
            raise StorageError(f"{folder / HEAD} lists something that is not part of a checkpoint")
        by_name.setdefault(str(index.fields().get("fqn")), []).append((index.fields().get("offset"), entry))
    files = {str(entry.fields().get("relative_path")) for held in by_name.values() for _, entry in held}
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
    fields = about.fields()
    shape, chunks, dtype = counts(fields.get("size")), fields.get("chunks"), _number_format(fields.get("properties"))
    if (
        shape is None
        or not isinstance(chunks, list)
        or not all(isinstance(each, Record) for each in chunks)
        or not dtype
    ):
        raise StorageError(f"{folder / HEAD} does not say what {name} is")
    sizes = {counts(chunk.fields().get("offsets")): counts(chunk.fields().get("sizes")) for chunk in chunks}
    pieces: list[TensorPiece] = []
    for offset, entry in held:
        at = counts(offset) if offset is not None else tuple(0 for _ in shape)
        size = sizes.get(at)
        if at is None or size is None:
            raise StorageError(f"{folder / HEAD}: {name} has a part at {at}, and no chunk begins there")
        pieces.append(
            TensorPiece(at, _chunk(folder, name, dtype, size, entry), str(entry.fields().get("relative_path")))
        )
    return assembled(name, dtype, shape, pieces)


def _number_format(properties: Any) -> torch.dtype | None:
    if not isinstance(properties, Record):
        return None
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else properties.fields().get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else None


def _chunk(folder: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...], entry: Record) -> Stored:
    fields = entry.fields()
    start, length, path = fields.get("offset"), fields.get("length"), folder / str(fields.get("relative_path"))
    if type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise StorageError(f"{folder / HEAD} does not say where in {path.name} {name} lies")
    if fields.get("transform_descriptors"):
        raise StorageError(f"{path}: {name} is stored in a packed form, which is not read; save without transforms")
    if path.stat().st_size < start + length:
        raise StorageError(f"{path} ends at {path.stat().st_size} bytes, before {name} at {start} does")

    def read() -> Tensor:
        with path.open("rb") as file:
            tensor = read_part(file, start, length, f"{path}: {name}")
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise StorageError(f"{path}: {name} is not the {shape} {dtype} that {HEAD} lists")
        return tensor

    return Stored(dtype, shape, read)

"""Pickles of other programs read without running anything: torch's own restricted reader, and records for classes.

A sharded tensor is pickled as an object of a class of torch.distributed. Instead of that class the reader is given one
that only keeps what it is told: no process group is needed, files of older versions of torch read alike, and a file
that names anything else is refused.
"""

import contextlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from turnwise.errors import StorageError, one_line
from turnwise.system.files import check_regular

_TENSOR, _OLD = "torch.distributed.tensor.", "torch.distributed._tensor."
_SHARD, _MESH = "torch.distributed._shard.", "torch.distributed._mesh_layout."
_KEPT = (
    *(f"{module}placement_types.{name}" for module in (_TENSOR, _OLD) for name in ("Shard", "Replicate", "Partial")),
    *(f"{_TENSOR}placement_types.{name}" for name in ("_StridedShard", "_Partial")),
    *(f"{_TENSOR}_dtensor_spec.{name}" for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    *(f"{_OLD}placement_types.{name}" for name in ("DTensorSpec", "TensorMeta", "_Partial", "_StridedShard")),
    *(f"{_OLD}_dtensor_spec.{name}" for name in ("DTensorSpec", "TensorMeta")),
    "torch.distributed.device_mesh.DeviceMesh", "torch.distributed._device_mesh.DeviceMesh",
    f"{_MESH}_MeshLayout", f"{_MESH}_FlatLayout",
    f"{_SHARD}metadata.ShardMetadata", f"{_SHARD}sharded_tensor.shard.Shard",
    f"{_SHARD}sharded_tensor.metadata.ShardedTensorMetadata", f"{_SHARD}sharded_tensor.metadata.TensorProperties",
    f"{_SHARD}sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    f"{_SHARD}sharding_spec.chunk_sharding_spec.ChunkShardingSpec", f"{_SHARD}sharding_spec.api.EnumerableShardingSpec",
    f"{_SHARD}sharded_tensor.api.ProcessGroupState", "torch.distributed.remote_device._remote_device",
    # Beside the weights in Megatron's files: arguments, states of random generators and of Transformer Engine.
    "argparse.Namespace", "types.SimpleNamespace", "_io.BytesIO", "pathlib.PosixPath",
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype",
)  # fmt: skip
_DISTRIBUTED = (
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    *(f"torch.distributed.checkpoint.filesystem.{name}" for name in (
        "_StorageInfo", "_StoragePrefix", "SerializationFormat", "StreamTransformExtension",
    )),
    "pathlib.PosixPath", "pathlib._local.PosixPath",
)  # fmt: skip
_MEGATRON = "megatron."
"""Its own classes stand in its arguments, which nobody reads here: any of them is kept as a record."""
LONGEST_HEAD = 1 << 30
"""More of a distributed checkpoint's table of contents is not read."""


class Record:
    """What a pickle says of an object: the name of its class, what it is made of, and its state."""

    kind: str = ""

    def __new__(cls, *args: Any) -> "Record":
        record = object.__new__(cls)
        record.args, record.state = args, None
        return record

    def __init__(self, *args: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self) -> dict[str, Any]:
        """Its attributes, of a class with slots or without."""
        values: dict[str, Any] = {}
        for part in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(part, dict):
                values |= part
        return values


def counts(value: object) -> tuple[int, ...] | None:
    """A shape or a place as a pickle has it; None for what is neither."""
    if isinstance(value, list | tuple) and all(type(each) is int and each >= 0 for each in value):
        return tuple(value)
    return None


class ShardedRecord(torch.Tensor):
    """A sharded tensor as a pickle has it: shape and number format of the whole, and the state with this rank's part.

    The reader wants a kind of tensor here; no computation is possible with it.
    """

    said: Any = None

    def __setstate__(self, state: Any) -> None:
        self.said = state

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise StorageError("a sharded tensor was used as if it were whole")


class PlacedRecord(ShardedRecord):
    """A DTensor as a pickle has it, with its placement on the mesh of devices."""


class ListedRecord(ShardedRecord):
    """A ShardedTensor, which lists where its shards lie."""


def _record(name: str) -> type[Record]:
    return type(name.rpartition(".")[2], (Record,), {"kind": name.rpartition(".")[2]})


def _inner(owner: Any, name: Any) -> type[Record]:
    """For `getattr`, by which older pickles name a class inside a class, and older Pythons a member of an enum."""
    return Record


_RECORDS = {name: _record(name) for name in (*_KEPT, *_DISTRIBUTED)}
_GLOBALS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *((_RECORDS[name], name) for name in _KEPT),
    *((PlacedRecord, f"{module}DTensor") for module in (_TENSOR, f"{_TENSOR}_api.", _OLD, f"{_OLD}api.")),
    (ListedRecord, f"{_SHARD}sharded_tensor.api.ShardedTensor"),
    (_inner, "builtins.getattr"),
    (Record, f"{__name__}.Record"),  # what `_inner` gives must be known too
]


@contextlib.contextmanager
def _only_records() -> Iterator[None]:
    """Inside, torch's reader knows our records and none of the classes that this process may have registered."""
    before = get_safe_globals()
    clear_safe_globals()
    add_safe_globals(_GLOBALS)
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def read_pickle(path: Path) -> Any:
    """What a file of `torch.save` holds; its tensors are mapped from the file and read when they are used."""
    with _only_records():
        try:
            check_regular(path)
            foreign = get_unsafe_globals_in_checkpoint(path)
            _refuse([name for name in foreign if not name.startswith(_MEGATRON)], path)
            with safe_globals([(Record, name) for name in foreign]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except StorageError:
            raise
        except Exception as error:  # torch raises whatever the first broken byte makes it stumble over
            raise StorageError(f"{path} cannot be read: {one_line(error)[:300]}") from error


def read_part(file: BinaryIO, start: int, length: int, where: str) -> Any:
    """The same of a part of a file."""
    with _only_records():
        try:
            file.seek(start)
            part = io.BytesIO(file.read(length))
            _refuse(get_unsafe_globals_in_checkpoint(part), where)
            part.seek(0)
            return torch.load(part, map_location="cpu", weights_only=True)
        except StorageError:
            raise
        except Exception as error:  # as above
            raise StorageError(f"{where} cannot be read: {one_line(error)[:300]}") from error


def _refuse(names: list[str], where: object) -> None:
    if names:
        raise StorageError(
            f"{where} names {', '.join(sorted(names)[:5])}, which is neither a tensor nor what trainers keep beside "
            "them; nothing of it is run, and the file is not read"
        )


class _HeadReader(pickle.Unpickler):
    """For the table of contents of a distributed checkpoint, a pickle of a newer protocol than torch's reader takes."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _DISTRIBUTED:
            return _RECORDS[full]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        plain = {"torch.Size": torch.Size, "collections.OrderedDict": OrderedDict, "builtins.set": set}
        if full in plain:
            return plain[full]
        if full == "torch.serialization._get_layout":
            return str
        if full == "builtins.getattr":
            return _inner
        if module.startswith(_MEGATRON):
            return Record
        raise StorageError(f"it names {full}, which no table of contents holds; nothing of it is run")


def read_head(path: Path) -> Record:
    """The table of contents of a distributed checkpoint."""
    try:
        check_regular(path)
        if path.stat().st_size > LONGEST_HEAD:
            raise StorageError("it is too long for a table of contents")
        with path.open("rb") as file:
            head = _HeadReader(file).load()
    except Exception as error:  # a broken pickle raises whatever its first wrong byte asks for
        raise StorageError(f"{path} cannot be read: {one_line(error)[:300]}") from error
    if not isinstance(head, Record) or head.kind != "Metadata":
        raise StorageError(f"{path} is not a table of contents of a distributed checkpoint")
    return head

"""The state of a sharded learner as a torch distributed checkpoint: written beside the training, read by any number.

A folder `learner` with a file of each rank, torch's `.metadata` and our `info.json`. The tensors have the names that
`LocalLearner.state` gives them, so that one process reads what several wrote; several read its file too.
"""

import io
import json
import pickle
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from turnwise.engines.learners.state import FILE, SHARDED, check_info, read_head
from turnwise.errors import StorageError
from turnwise.ext.fsdp.shards import own_rows

INFO, METADATA = "info.json", ".metadata"
FORMAT = 1
"""Raised when names or their meaning change; a folder of another format is refused by name."""
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}  # fmt: skip
"""What a `.metadata` may name: anything else in a pickle is code that a folder wants run."""


def begin(
    folder: Path, tensors: Mapping[str, Tensor], info: Mapping[str, Any], group: dist.ProcessGroup
) -> "Future[Any]":
    """Copy the tensors aside and start to write them; the result is there when the checkpoint is whole."""
    target = folder / SHARDED
    target.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        (target / INFO).write_text(json.dumps({"format": FORMAT, **info}), encoding="utf-8")
    writer = FileSystemWriter(target, single_file_per_rank=True, sync_files=True)
    stager = DefaultStager(StagingOptions(False, False, False, False))  # copied when it returns: training goes on
    begun = async_save(dict(tensors), storage_writer=writer, process_group=group, async_stager=stager)
    written = begun if isinstance(begun, Future) else begun.upload_completion
    written.add_done_callback(lambda _: stager.close())
    return written


def _member(owner: Any, name: Any) -> Enum:
    """For `getattr`, by which Python before 3.11.4 pickles a member of an enum."""
    if not (isinstance(owner, EnumMeta) and name in owner.__members__):
        raise pickle.UnpicklingError(f"it asks {owner!r:.80} for {name!r:.80}, which is not a member of an enum")
    member: Enum = owner[name]
    return member


class _Metadata(pickle.Unpickler):
    """Reads a `.metadata` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is nothing of a checkpoint's")
        return super().find_class(module, name)


class CheckedReader(FileSystemReader):
    """torch's reader, but what a folder would have us run is refused."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's table of tensors."""
        path = Path(self.path) / METADATA
        try:
            table = _Metadata(io.BytesIO(path.read_bytes())).load()
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
        except Exception as error:  # a pickle breaks in as many ways as there are classes
            raise StorageError(f"cannot read {path}: {error}") from error
        if not isinstance(table, Metadata):
            raise StorageError(f"{path} is not a table of a checkpoint's tensors")
        _check_table(table, path)
        if table.storage_meta is None:
            table.storage_meta = StorageMeta()
        table.storage_meta.load_id = self.load_id
        return table


def _check_table(table: Metadata, path: Path) -> None:
    """torch unpickles freely what is no tensor, and opens any file that a table names."""
    try:
        odd = [
            name for name, entry in table.state_dict_metadata.items() if not isinstance(entry, TensorStorageMetadata)
        ]
        files = {str(location.relative_path) for location in table.storage_data.values()}
    except AttributeError as error:
        raise StorageError(f"{path} is not a table of a checkpoint's tensors: {error}") from error
    if odd:
        raise StorageError(f"{path.parent} holds {odd[0]}, which is not a tensor")
    if outside := sorted(name for name in files if Path(name).name != name):
        raise StorageError(f"{path} names {outside[0]!r}, which is not a file beside it")


def read_info(folder: Path) -> dict[str, Any]:
    """What JSON holds of a saved state, whoever wrote it."""
    if (folder / FILE).is_file():
        return read_head(folder)
    path = folder / SHARDED / INFO
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    return check_info(path, info, FORMAT)


def kinds(folder: Path) -> dict[str, Tensor]:
    """Names, shapes and number formats of a saved state's tensors, without the numbers."""
    if (folder / FILE).is_file():
        with safe_open(folder / FILE, "pt") as file:
            return {name: _kind(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (no dict)
    tensors: dict[str, Tensor] = {}
    for name, entry in CheckedReader(folder / SHARDED).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    return tensors


def _kind(entry: Any) -> Tensor:
    formats = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
               "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8}  # fmt: skip
    return torch.empty(entry.get_shape(), dtype=formats[entry.get_dtype()], device="meta")


def read_shards(folder: Path, places: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill these: plain tensors whole, shared out ones with this rank's part. Names and shapes are checked already."""
    if (folder / FILE).is_file():
        with safe_open(folder / FILE, "pt") as file, torch.no_grad():
            for name, tensor in places.items():
                _fill(tensor, file.get_slice(name) if tensor.dim() else file.get_tensor(name))
        return
    reader = CheckedReader(folder / SHARDED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a single process is a single process
            load(dict(places), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        problem = next(iter(error.failures.values()))[0]
        raise StorageError(f"cannot read {folder / SHARDED}: {problem}") from error


def _fill(target: Tensor, source: Any) -> None:
    if not isinstance(target, DTensor):
        target.copy_(source[:] if target.dim() else source)
        return
    local, start = own_rows(target)
    if len(local):
        local.copy_(source[start : start + len(local)])


def read_whole(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What several processes wrote, in one."""
    info = read_info(folder)
    places = {name: torch.empty_like(kind, device="cpu") for name, kind in kinds(folder).items()}
    read_shards(folder, places, None)
    return places, info

"""The safetensors files of a folder, of which any rows are read alone: for processes that share a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from turnwise.engines.model.huggingface_folder import (
    STORED,
    DecoderConfig,
    Fused,
    layout,
    not_finite,
    refuse_other_head,
    refuse_unread,
    tensor_files,
)
from turnwise.errors import EngineError

OwnRows = Callable[[Tensor], tuple[Tensor, int]]
"""Of a live weight the rows that this process has, on their own memory, and the number of the first among all."""


class CheckpointRows:
    """`CheckpointRows(folder).rows("lm_head.weight", 0, 100)`. Nothing is read but what is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of all tensors, by their names in the files."""
        self._homes: dict[str, Any] = {}
        for path in tensor_files(folder):
            try:
                file: Any = safe_open(path, framework="pt")
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    self.shapes[name], self._homes[name] = tuple(file.get_slice(name).get_shape()), file
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{path} cannot be read: {error}") from error

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """So many of a tensor's rows from `first` on, in the file's memory and number format."""
        return self._read(name, lambda: self._homes[name].get_slice(name)[first : first + count])

    def whole(self, name: str) -> Tensor:
        """A tensor, in the file's memory and number format."""
        return self._read(name, lambda: self._homes[name].get_tensor(name))

    def _read(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        try:
            tensor = read()
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{self.folder}: {name} cannot be read: {error}") from error
        if tensor.is_floating_point() and tensor.dtype not in STORED:
            raise EngineError(f"{self.folder}: {name} holds {tensor.dtype}; unquantised weights are supported")
        return tensor


@torch.no_grad()
def fill_decoder(
    config: DecoderConfig, checkpoint: CheckpointRows, weight: Callable[[str], Tensor], own_rows: OwnRows
) -> None:
    """Read this process's rows of the native decoder's weights, which `weight` gives by our names. The shapes in the
    files are checked already."""
    where = str(checkpoint.folder)
    refuse_unread(config, checkpoint.shapes, where)
    for part in layout(config):
        own, first = own_rows(weight(part.name))
        _fill_part(part, checkpoint, own, first)
        if not own.isfinite().all():
            raise not_finite(part, where)
    if config.tied and "lm_head.weight" in checkpoint.shapes:
        own, first = own_rows(weight("embed"))
        refuse_other_head(where, torch.equal(checkpoint.rows("lm_head.weight", first, len(own)).to(own), own))


def _fill_part(part: Fused, checkpoint: CheckpointRows, own: Tensor, first: int) -> None:
    """The fused tensor's rows from `first` on, out of the tensors that it stacks."""
    start = 0
    for name, rows in part.sources:
        begin, end = max(first, start), min(first + len(own), start + rows)
        if begin < end:
            source = checkpoint.rows(name, begin - start, end - begin)
            if not source.is_floating_point():
                raise EngineError(
                    f"{checkpoint.folder}: {name} holds {source.dtype}; unquantised weights are supported"
                )
            own[begin - first : end - first].copy_(source)
        start += rows

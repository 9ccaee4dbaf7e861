"""A safetensors file written as it goes: one tensor at a time leaves its device, and none is held twice."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from turnwise.errors import EngineError
from turnwise.files import replacing

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
"""As the format names them."""
ALIGNED = 8
"""The first tensor begins at a multiple of this many bytes."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """The file appears whole or not at all; tensors may share memory, and each is written whole."""
    write_made(path, {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, tensors.get, metadata)


def write_made(
    path: Path,
    formats: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    make: Callable[[str], Tensor | None],
    metadata: Mapping[str, str],
) -> None:
    """The same of tensors that are made one by one, in the number format and the shape announced."""
    # The widest first, as the format's own library has it: every tensor then lies at a multiple of its width.
    order = sorted(formats.items(), key=lambda entry: (-entry[1][0].itemsize, entry[0]))
    head: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, (dtype, shape) in order:
        if dtype not in DTYPES:
            raise EngineError(f"{name} is {dtype}, which cannot be written to {path}")
        end = start + math.prod(shape) * dtype.itemsize
        head[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % ALIGNED)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape) in order:
            tensor = make(name)
            if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                raise EngineError(f"{name} was announced as {tuple(shape)} {dtype} and is another tensor")
            file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)

"""A safetensors file written as it goes: one tensor at a time leaves its device, and none is held twice."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from turnwise.errors import EngineError
from turnwise.system.files import replacing

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
"""As the format names them."""
ALIGNED = 8
"""The first tensor begins at a multiple of this many bytes."""


Formats = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Number format and shape by name."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """The file appears whole or not at all; tensors may share memory, and each is written whole."""
    write_made(path, formats_of(tensors), tensors.__getitem__, metadata)


def formats_of(tensors: Mapping[str, Tensor]) -> Formats:
    """What is known of tensors before they come."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def write_made(path: Path, formats: Formats, make: Callable[[str], Tensor], metadata: Mapping[str, str]) -> None:
    """The same of tensors that are made one by one, in the number format and the shape announced."""
    # The widest first, as the format's own library has it: every tensor then lies at a multiple of its width.
    order = dict(sorted(formats.items(), key=lambda entry: (-entry[1][0].itemsize, entry[0])))
    write_stream(path, order, ((name, make(name)) for name in order), metadata)


def write_stream(
    path: Path, formats: Formats, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """The same of tensors that come one at a time, in the order in which they were announced."""
    head: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, (dtype, shape) in formats.items():
        if dtype not in DTYPES:
            raise EngineError(f"{name} is {dtype}, which cannot be written to {path}")
        end = start + math.prod(shape) * dtype.itemsize
        head[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % ALIGNED)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, tensor), (wanted, (dtype, shape)) in zip(tensors, formats.items(), strict=True):
            if (name, tensor.dtype, tuple(tensor.shape)) != (wanted, dtype, tuple(shape)):
                raise EngineError(f"{name} came for {path} in the place of {wanted}, {tuple(shape)} {dtype}")
            file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)

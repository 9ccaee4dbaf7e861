"""A safetensors file written as it goes: one tensor at a time leaves its device, and none is held twice."""

import json
from collections.abc import Iterable, Mapping
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
    # The widest first, as the format's own library has it: every tensor then lies at a multiple of its width.
    order = sorted(tensors.items(), key=lambda entry: (-entry[1].element_size(), entry[0]))
    write_stream(path, dict(order), order, metadata)


def write_stream(
    path: Path, kinds: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """The same of tensors that come one at a time, in the order of `kinds`: of these only shapes and formats count."""
    head: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in kinds.items():
        if tensor.dtype not in DTYPES:
            raise EngineError(f"{name} is {tensor.dtype}, which cannot be written to {path}")
        end = start + tensor.nbytes
        head[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % ALIGNED)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, tensor), (wanted, kind) in zip(tensors, kinds.items(), strict=True):
            if (name, tensor.dtype, tensor.shape) != (wanted, kind.dtype, kind.shape):
                raise EngineError(f"{name} came for {path} in the place of {wanted}")
            file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)

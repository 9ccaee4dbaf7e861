"""A tensor that is read when it is wanted: what is known of it before, and how the pieces of one are put together."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from turnwise.engines.model.huggingface_folder import tensor_files
from turnwise.engines.model.tensor_file import DTYPES
from turnwise.errors import StorageError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes, to compare numbers by their bits: NaN is not itself."""
NUMBER_FORMATS = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """`Stored(torch.bfloat16, (4, 8), read)`; every call of `read` gives the tensor anew, and nobody keeps it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    pieces: "tuple[TensorPiece, ...]" = ()
    """What it is put together of, where it is."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Stored":
        """A tensor that is there already, such as one mapped from a file."""
        plain = tensor.detach()
        return cls(plain.dtype, tuple(plain.shape), lambda: plain)

    @property
    def bytes(self) -> int:
        """The size of its numbers in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def changed(self, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> "Stored":
        """What a function makes of it, in the same number format."""
        return Stored(self.dtype, shape, lambda: change(self.read()))


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of a tensor: where it begins, and the file it is from."""

    offsets: tuple[int, ...]
    content: Stored
    origin: str


def same_bits(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers to the last bit."""
    if first.shape != other.shape or first.dtype != other.dtype:
        return False
    kind = BITS[first.element_size()] if first.dtype.is_floating_point else first.dtype
    return torch.equal(first.contiguous().view(kind), other.contiguous().view(kind))


def assembled(name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Sequence[TensorPiece]) -> Stored:
    """The tensor whose boxes these are; several of the same box must hold the same bits, and none may be missing."""
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[TensorPiece]] = {}
    for piece in pieces:
        if piece.content.dtype != dtype:
            raise StorageError(f"{piece.origin}: {name} is {piece.content.dtype} there and {dtype} elsewhere")
        if math.prod(piece.content.shape):
            boxes.setdefault((piece.offsets, piece.content.shape), []).append(piece)
    if math.prod(shape) and not _tile(list(boxes), shape, 0):
        listing = ", ".join(f"{piece.content.shape} at {piece.offsets} of {piece.origin}" for piece in pieces[:4])
        raise StorageError(
            f"the pieces of {name} do not make up {shape}: {listing}{', ...' if len(pieces) > 4 else ''}"
        )

    def read() -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for (offsets, sizes), copies in boxes.items():
            first = copies[0].content.read()
            for other in copies[1:]:
                if not same_bits(first, other.content.read()):
                    raise StorageError(
                        f"{name} differs between {copies[0].origin} and {other.origin}, where both hold it"
                    )
            box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            whole[box] = first
        return whole

    return Stored(dtype, shape, read, tuple(pieces))


def picked(name: str, stored: Stored, index: int) -> Stored:
    """One of the tensors that are stacked along the first axis; only its own pieces are read where it has some."""
    thin = all(piece.content.shape[:1] == (1,) for piece in stored.pieces)
    if not stored.pieces or not thin:
        return stored.changed(stored.shape[1:], operator.itemgetter(index))
    own = [
        TensorPiece(
            piece.offsets[1:], piece.content.changed(piece.content.shape[1:], operator.itemgetter(0)), piece.origin
        )
        for piece in stored.pieces
        if piece.offsets[0] == index
    ]
    return assembled(name, stored.dtype, stored.shape[1:], own)


def _tile(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...], axis: int) -> bool:
    """Whether boxes fill a shape without gap or overlap, cut along one axis after the other as all shardings are."""
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return False
    if axis == len(shape):
        return len(boxes) == 1
    slabs: dict[tuple[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for box in boxes:
        slabs.setdefault((box[0][axis], box[1][axis]), []).append(box)
    end = 0
    for (start, size), inside in sorted(slabs.items()):
        if start != end or not _tile(inside, shape, axis + 1):
            return False
        end += size
    return end == shape[axis]


def read_safetensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a Hugging Face folder, none of them read yet."""
    tensors: dict[str, Stored] = {}
    for path in tensor_files(folder):
        try:
            file: Any = safe_open(path, framework="pt")  # its stubs lack types
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in tensors:
                    raise StorageError(f"{path}: {name} stands in another file of {folder} too")
                head = file.get_slice(name)
                if head.get_dtype() not in NUMBER_FORMATS:
                    raise StorageError(f"{path}: {name} holds {head.get_dtype()}; unquantised weights are supported")
                read = functools.partial(file.get_tensor, name)
                tensors[name] = Stored(NUMBER_FORMATS[head.get_dtype()], tuple(head.get_shape()), read)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{path} cannot be read: {error}") from error
    return tensors

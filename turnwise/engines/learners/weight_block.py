"""A block of memory that two processes of this machine see, where one leaves all weights for the other to read.

On a GPU it is CUDA memory that the reader allocates and the writer maps (CUDA IPC): the reader outlives the writer, so
nothing is mapped that is gone. Elsewhere it is memory without a name, which the kernel frees with the last process that
has it: no file is left whatever happens.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from turnwise.errors import EngineError

ALIGNED = 256
"""Bytes at a multiple of which each weight begins."""

Shapes = Mapping[str, tuple[int, ...]]


def block_bytes(shapes: Shapes, dtype: torch.dtype) -> int:
    """What all of these weights take."""
    return sum(_room(shape, dtype) for shape in shapes.values())


def in_block(block: Tensor, shapes: Shapes, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights of a block of bytes, not copied; both sides have the same shapes in the same order."""
    start = 0
    for name, shape in shapes.items():
        yield name, block[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        start += _room(shape, dtype)


def fill(block: Tensor, shapes: Shapes, dtype: torch.dtype, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy all weights into a block, in its number format; they are there when this returns."""
    places, filled = dict(in_block(block, shapes, dtype)), set[str]()
    for name, tensor in weights:
        places[name].copy_(tensor)
        filled.add(name)
    if missing := places.keys() - filled:
        raise EngineError(f"the learner did not give these weights: {', '.join(sorted(missing)[:5])}")
    if block.device.type == "cuda":
        torch.cuda.synchronize(block.device)


def checksum(block: Tensor) -> int:
    """Of what a process sees in a block."""
    return int(block.sum(dtype=torch.int64))


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED


class MappedBlock:
    """Of the machine's own memory, in both processes; the one that is started inherits `descriptor`."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # not bounded by /dev/shm, which containers make small
            self._file: IO[bytes] = os.fdopen(os.memfd_create("turnwise-weights"), "w+b", buffering=0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 -- it lives as long as this
        self.descriptor = self._file.fileno()

    def allocate(self, size: int) -> "MappedMemory":
        """Take so many bytes of memory, which the other process may map then."""
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, size)
            else:
                os.ftruncate(self.descriptor, size)
        except OSError as error:
            raise EngineError(f"no memory to hand {size / 2**30:.1f} GiB of weights over: {error.strerror}") from error
        return MappedMemory(self.descriptor, size)

    def close(self) -> None:
        """Leave it to whoever still has it mapped."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """As it travels to the other process."""

    descriptor: int
    size: int

    def open(self) -> Tensor:
        """The bytes, in either process."""
        return torch.frombuffer(mmap.mmap(self.descriptor, self.size), dtype=torch.uint8)


class DeviceBlock:
    """CUDA memory of the process that reads the weights; `shared` is for the one that writes them."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        handle: tuple[Any, ...] = self.tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        self.shared = DeviceMemory(handle, size)

    def close(self) -> None:
        """When the other process has ended and no tensor of the block is used any more.

        The other one was killed and gave nothing back: that is done for it, or torch would keep the memory for ever.
        """
        counters, place = self.shared.handle[4:6]
        torch.UntypedStorage._release_ipc_counter_cuda(counters, place)
        del self.tensor
        torch.cuda.ipc_collect()  # with the file of counters


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """As it travels to the other process."""

    handle: tuple[Any, ...]
    """Device, CUDA's handle, size, offset, torch's file of counters and a place in it, an event and whether to wait."""
    size: int

    def open(self) -> Tensor:
        """The bytes, in the other process, which has initialised CUDA."""
        try:
            storage = torch.UntypedStorage._new_shared_cuda(*self.handle)
        except RuntimeError as error:
            raise EngineError(
                "two processes cannot share memory of this GPU (CUDA IPC); set learner.place=here: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (self.size,), (1,))

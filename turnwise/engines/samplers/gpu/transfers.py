"""Numbers on their way to a device and back: pinned memory, lent to a run and taken back when the run has been read.

Every call into CUDA gives the interpreter away, and a busy event loop gives it back late; so a run makes few of them.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """Memory of the host that a device reads and writes by itself, and the same as an array."""

    tensor: Tensor
    array: Numbers

    @classmethod
    def of(cls, length: int) -> "Pinned":
        """A page-locked buffer for so many int32 numbers."""
        tensor = torch.empty(length, dtype=torch.int32, pin_memory=True)
        return cls(tensor, tensor.numpy())


@dataclass(frozen=True, slots=True, eq=False)
class DeviceOutput:
    """What a run writes on the device: tokens and log-probs [steps, rows] in one piece of memory, and the line it is
    at."""

    numbers: Tensor
    tokens: Tensor
    """int32, -1 where none was drawn."""
    logprobs: Tensor
    step: Tensor

    @classmethod
    def on(cls, device: torch.device, steps: int, rows: int) -> "DeviceOutput":
        """An empty output on a device: no token is written yet."""
        numbers = torch.zeros(2 * steps * rows, dtype=torch.int32, device=device)
        tokens, logprobs = numbers.view(2, steps, rows)
        tokens.fill_(-1)
        step = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(numbers, tokens, logprobs.view(torch.float32), step)


class Transfers:
    """Uploads and downloads of one stream. What was lent since the last download comes back when that one is read: the
    device has then done all that was launched before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        """On the device, by the key of the work that reads them."""
        self._free: dict[int, list[Pinned]] = {}
        self._events: list[torch.cuda.Event] = []
        self._lent: list[Pinned] = []

    def up(self, key: tuple[object, ...], numbers: Numbers) -> Tensor:
        """Into the buffer of this key, which stays where it is."""
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = torch.zeros(len(numbers), dtype=torch.int32, device=self._device)
        if self._device.type == "cuda":
            staged = self._lend(len(numbers))
            staged.array[:] = numbers
            buffer.copy_(staged.tensor, non_blocking=True)
        else:
            buffer.copy_(torch.from_numpy(numbers))
        return buffer

    def down(self, output: DeviceOutput) -> "Launched":
        """What the work launched so far leaves in `output`."""
        shape = output.tokens.shape
        if self._device.type != "cuda":
            return Launched(self, output.numbers.clone().numpy(), (shape[0], shape[1]), None)
        room = self._lend(len(output.numbers))
        room.tensor.copy_(output.numbers, non_blocking=True)
        arrived = self._events.pop() if self._events else torch.cuda.Event()
        arrived.record()
        lent, self._lent = self._lent, []
        return Launched(self, room.array, (shape[0], shape[1]), arrived, lent)

    def clear(self) -> None:
        """Forget every buffer, when nothing is under way."""
        self._buffers.clear()
        self._free.clear()
        self._lent.clear()

    def _lend(self, length: int) -> Pinned:
        free = self._free.get(length)
        pinned = free.pop() if free else Pinned.of(length)
        self._lent.append(pinned)
        return pinned

    def take_back(self, lent: list[Pinned], arrived: torch.cuda.Event) -> None:
        """What a run that has been read had borrowed."""
        for pinned in lent:
            self._free.setdefault(len(pinned.array), []).append(pinned)
        self._events.append(arrived)


@dataclass(slots=True, eq=False)
class Launched:
    """Tokens [steps, rows] and log-probs on their way to the host; to be read once."""

    transfers: Transfers
    numbers: Numbers
    shape: tuple[int, int]
    arrived: torch.cuda.Event | None
    lent: list[Pinned] = field(default_factory=list)

    def read(self, rows: int) -> tuple[Numbers, NDArray[np.float32]]:
        """Wait for them; those of the first `rows`, without the padding. A token is -1 where none was drawn."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers = self.numbers.reshape(2, *self.shape)[:, :, :rows].copy()
        if self.arrived is not None:
            self.transfers.take_back(self.lent, self.arrived)
            self.arrived = None
        return numbers[0], numbers[1].view(np.float32)

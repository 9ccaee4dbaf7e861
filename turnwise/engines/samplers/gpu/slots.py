"""What a device knows of the turns it writes, by slot: tokens, places, limits, pages and how to draw."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.kernels.sampling import STOP_IDS
from turnwise.engines.samplers.request import SamplingParams

ENTRY = 11 + STOP_IDS
"""Numbers that describe a slot: itself, token, place, remaining, active, stop ids, noise key (two), temperature, top_k,
top_p, shift; of 32 bits each."""
_KEY = 5 + STOP_IDS


@functools.lru_cache(maxsize=64)
def _drawn_by(temperature: float, top_k: int, top_p: float, stop_ids: frozenset[int]) -> NDArray[np.int32]:
    """An entry with what it says of how to draw; the rest is the slot's own."""
    entry = np.full(ENTRY, -1, dtype=np.int32)
    entry[4] = 1
    stops = sorted(stop_ids)[:STOP_IDS]
    entry[5 : 5 + len(stops)] = stops
    entry[_KEY + 2] = np.array([temperature], dtype=np.float32).view(np.int32)[0]
    entry[_KEY + 3] = min(top_k, np.iinfo(np.int32).max)
    entry[_KEY + 4] = np.array([top_p], dtype=np.float32).view(np.int32)[0]
    return entry


def slot_entry(
    slot: int, token: int, position: int, remaining: int, params: SamplingParams, noise_bits: int, shift: int = 0
) -> NDArray[np.int32]:
    """A slot about to be written in: `token` at `position` is the last one that is there, and images before it add
    `shift` to the positions behind it."""
    entry = _drawn_by(params.temperature, params.top_k, params.top_p, params.stop_ids).copy()
    entry[:4] = slot, token, position, remaining
    entry[_KEY : _KEY + 2] = np.uint64(noise_bits).reshape(1).view(np.int32)
    entry[_KEY + 5] = shift
    return entry


def stops_of(entry: NDArray[np.int32]) -> NDArray[np.int32]:
    """The stop ids of a slot, padded with -1."""
    return entry[5:_KEY]


@functools.cache
def _empty_slot() -> NDArray[np.int32]:
    entry = np.full(ENTRY, -1, dtype=np.int32)
    entry[1:5] = 0
    entry[_KEY:] = 0
    return entry


def empty_entry(slot: int) -> NDArray[np.int32]:
    """A slot in which nobody writes."""
    entry = _empty_slot().copy()
    entry[0] = slot
    return entry


def no_entries() -> NDArray[np.int32]:
    """An update that changes no slot."""
    return np.zeros((0, ENTRY), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SlotState:
    """Tensors [slots + 1] on the device; the last row is for padding, which writes somewhere too."""

    last_token: Tensor
    """int64: the last token of the sequence, whose keys and values are not there yet."""
    places: Tensor
    """int32: where it stands."""
    remaining: Tensor
    active: Tensor
    """int32, 1 while the turn goes on."""
    stop_ids: Tensor
    """[slots + 1, STOP_IDS] int32, padded with -1."""
    keys: Tensor
    """int64: the bits of the noise key."""
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    shifts: Tensor
    """int32: what is added to a place for its position."""
    table: Tensor
    """[slots + 1, max_pages] int32: the pages of each sequence in order."""

    @classmethod
    def on(cls, device: torch.device, slots: int, max_pages: int) -> "SlotState":
        """The state of so many slots on a device, all of them free."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(slots + 1, *shape, dtype=dtype, device=device)

        whole, real = torch.int32, torch.float32
        return cls(
            last_token=zeros(torch.int64),
            places=zeros(whole),
            remaining=zeros(whole),
            active=zeros(whole),
            stop_ids=zeros(whole, STOP_IDS),
            keys=zeros(torch.int64),
            temperature=zeros(real),
            top_k=zeros(whole),
            top_p=zeros(real),
            shifts=zeros(whole),
            table=zeros(whole, max_pages),
        )

    @property
    def padding(self) -> int:
        """The number of the slot that padding rows write to, which no turn reads."""
        return len(self.places) - 1

    def enter(self, entries: Tensor) -> None:
        """Take over entries [n, ENTRY] of different slots, or of padding."""
        slot = entries[:, 0].long()
        self.last_token.index_copy_(0, slot, entries[:, 1].long())
        self.places.index_copy_(0, slot, entries[:, 2])
        self.remaining.index_copy_(0, slot, entries[:, 3])
        self.active.index_copy_(0, slot, entries[:, 4])
        self.stop_ids.index_copy_(0, slot, entries[:, 5:_KEY])
        self.keys.index_copy_(0, slot, entries[:, _KEY : _KEY + 2].contiguous().view(torch.int64).squeeze(1))
        self.temperature.index_copy_(0, slot, entries[:, _KEY + 2].contiguous().view(torch.float32))
        self.top_k.index_copy_(0, slot, entries[:, _KEY + 3])
        self.top_p.index_copy_(0, slot, entries[:, _KEY + 4].contiguous().view(torch.float32))
        self.shifts.index_copy_(0, slot, entries[:, _KEY + 5])

    def lay(self, cells: Tensor) -> None:
        """Write into the page table: rows (flat index, page), indices all different but for padding."""
        self.table.view(-1).index_copy_(0, cells[:, 0].long(), cells[:, 1])

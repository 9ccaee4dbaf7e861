"""Sequences in scattered pages among garbage, for the tests of attention over pages."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.engines.kernels.paged_attention import PAGE, QueryBlocks, paged_attention, write_pages


@dataclass(frozen=True)
class Sequences:
    """Whole sequences in scattered pages, the q, k, v they were written from, and garbage in all other places."""

    lengths: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor

    def to(self, device: str) -> "Sequences":
        moved = {n: getattr(self, n).to(device) for n in ("q", "k", "v", "keys", "values", "table")}
        return replace(self, **moved)

    def in_float32(self) -> "Sequences":
        return replace(self, **{n: getattr(self, n).float() for n in ("q", "k", "v", "keys", "values")})

    def blocks(self, size: int, order: list[int] | None = None) -> QueryBlocks:
        """All queries of the sequences in blocks of `size`."""
        rows = []
        for slot in order if order is not None else range(len(self.lengths)):
            base, length = sum(self.lengths[:slot]), self.lengths[slot]
            rows += [(base + at, min(size, length - at), slot, at) for at in range(0, length, size)]
        first, count, slots, place = torch.tensor(rows, dtype=torch.int32, device=self.q.device).T.contiguous()
        return QueryBlocks(first, count, slots, place, size)


def tokens_of(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Slots and places of packed sequences."""
    slots = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    return slots.int(), torch.cat([torch.arange(n) for n in lengths]).int()


def sequences(
    lengths: list[int], heads: tuple[int, int] = (6, 2), dims: tuple[int, int] = (16, 16), dtype=torch.float32, seed=0
) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    total, (hq, hkv), (dim, value_dim) = sum(lengths), heads, dims

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q, k, v = random(total, hq, dim), random(total, hkv, dim), random(total, hkv, value_dim)
    width = max(-(-n // PAGE) for n in lengths) + 1
    pages = torch.randperm(len(lengths) * width + 3, generator=generator)[: len(lengths) * width]
    keys = torch.full((len(lengths) * width + 3, hkv, PAGE, dim), torch.nan, dtype=dtype)
    values = torch.full((*keys.shape[:3], value_dim), torch.nan, dtype=dtype)
    table = pages.view(len(lengths), width).int()
    for slot, length in enumerate(lengths):
        table[slot, -(-length // PAGE) :] = -1
    write_pages(keys, values, k, v, table, *tokens_of(lengths))
    return Sequences(lengths, q, k, v, keys, values, table)


def attend(s: Sequences, blocks: QueryBlocks, **settings) -> Tensor:
    return paged_attention(s.q, s.keys, s.values, s.table, blocks, scale=s.q.shape[-1] ** -0.5, **settings)


def alone(s: Sequences, blocks: QueryBlocks, index: int, **settings) -> Tensor:
    """The output of one query, computed in a batch of one whose only row it is, in a cache that holds ones besides."""
    first, slot, place = (int(x[index]) for x in (blocks.first, blocks.slot, blocks.place))
    used = -(-(place + 1) // PAGE)
    pages = s.table[slot, :used].long()
    keys, values = torch.ones_like(s.keys[: used + 1]), torch.ones_like(s.values[: used + 1])
    keys[1:], values[1:] = s.keys[pages], s.values[pages]
    table = torch.arange(1, used + 1, dtype=torch.int32, device=s.q.device).unsqueeze(0)
    inside = (place + 1) % PAGE or PAGE
    keys[-1, :, inside:], values[-1, :, inside:] = 5.0, -3.0
    one, zero = (torch.tensor([x], dtype=torch.int32, device=s.q.device) for x in (1, 0))
    block = QueryBlocks(zero, one, zero, torch.full_like(one, place), 1)
    small = replace(s, q=s.q[first : first + 1], keys=keys, values=values, table=table)
    return attend(small, block, **settings)[0]

"""Attention over pages: what the model's own attention computes, and bits that do not depend on the company."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from turnwise.engines.kernels.paged_attention import PAGE, QueryBlocks, paged_attention, write_pages
from turnwise.engines.model.attention import packed
from turnwise.engines.model.policy_model import Mixing


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


def naive(s: Sequences, window=None, softcap=None, sinks=None) -> Tensor:
    """One query and head at a time, in float64."""
    out = torch.zeros(len(s.q), s.q.shape[1], s.v.shape[2], dtype=torch.float64)
    groups, base = s.q.shape[1] // s.k.shape[1], 0
    for length in s.lengths:
        k, v = s.k[base : base + length].double(), s.v[base : base + length].double()
        for at in range(length):
            low = 0 if window is None else max(at - window + 1, 0)
            for head in range(s.q.shape[1]):
                scores = k[low : at + 1, head // groups] @ s.q[base + at, head].double() * s.q.shape[-1] ** -0.5
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = torch.softmax(scores, 0)[: at + 1 - low]
                out[base + at, head] = weights @ v[low : at + 1, head // groups]
        base += length
    return out.flatten(1)


LENGTHS = [1, 33, 70, 5]
SETTINGS = [{}, {"window": 9}, {"window": 40, "softcap": 2.0}, {"sinks": torch.linspace(-2, 3, 6)}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_reference_is_the_softmax_of_each_query_over_its_keys(settings, size):
    s = sequences(LENGTHS, dims=(16, 8))
    torch.testing.assert_close(
        attend(s, s.blocks(size), **settings).double(), naive(s, **settings), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_reference_is_the_models_own_attention(settings):
    s = sequences(LENGTHS)
    whole = packed(LENGTHS)(0, s.q, s.k, s.v, Mixing(**settings))
    torch.testing.assert_close(attend(s, s.blocks(4), **settings), whole, atol=1e-5, rtol=1e-5)


def test_tokens_without_a_slot_are_not_written():
    s = sequences([3])
    keys, values = s.keys.clone(), s.values.clone()
    slots, places = torch.tensor([-1, 0, -1]).int(), torch.tensor([0, 1, 99]).int()
    write_pages(keys, values, s.k + 1, s.v + 1, s.table, slots, places)
    page = int(s.table[0, 0])
    torch.testing.assert_close(keys[page, :, 1], s.k[1] + 1, rtol=0, atol=0)
    keys[page, :, 1], values[page, :, 1] = s.k[1], s.v[1]
    assert torch.equal(keys.nan_to_num(7.0), s.keys.nan_to_num(7.0))
    assert torch.equal(values.nan_to_num(7.0), s.values.nan_to_num(7.0))


def test_an_empty_block_is_not_looked_at():
    s = sequences([3, 40])
    one = s.blocks(1)
    nonsense = torch.tensor([10**6], dtype=torch.int32)
    more = QueryBlocks(*(torch.cat((nonsense, x)) for x in (one.first, one.count, one.slot, one.place)), size=1)
    more.count[0] = 0
    assert torch.equal(attend(s, more), attend(s, one))


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


def test_a_query_has_the_same_bits_alone_and_in_any_batch():
    s = sequences(LENGTHS)
    blocks = s.blocks(1)
    together = attend(s, blocks, window=40)
    assert torch.equal(together, attend(s, s.blocks(1, order=[3, 1, 0, 2]), window=40))
    for index in (0, 1, 33, 34, 90, 103, len(blocks.first) - 1):
        assert torch.equal(together[index], alone(s, blocks, index, window=40)), index

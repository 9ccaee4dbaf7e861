"""Attention over pages: what the model's own attention computes, and bits that do not depend on the company."""

import pytest
import torch
from paged_sequences import Sequences, alone, attend, sequences
from torch import Tensor

from turnwise.engines.kernels.paged_attention import (
    PAGE,
    QueryBlocks,
    invariant_size,
    paged_attention,
    write_pages,
)
from turnwise.engines.model.attention import packed
from turnwise.engines.model.policy_model import Mixing


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


def test_a_query_has_the_same_bits_alone_and_in_any_batch():
    s = sequences(LENGTHS)
    blocks = s.blocks(1)
    together = attend(s, blocks, window=40)
    assert torch.equal(together, attend(s, s.blocks(1, order=[3, 1, 0, 2]), window=40))
    assert torch.equal(together, attend(s, s.blocks(invariant_size(6, 2)), window=40))
    for index in (0, 1, 33, 34, 90, 103, len(blocks.first) - 1):
        assert torch.equal(together[index], alone(s, blocks, index, window=40)), index


def test_more_query_heads_of_a_key_head_leave_room_for_fewer_queries_in_the_smallest_tile():
    assert [invariant_size(heads, 2) for heads in (2, 6, 32, 64)] == [16, 5, 1, 1]


def test_blocks_that_hold_nothing_are_no_trouble() -> None:
    q, cache = torch.ones(3, 2, 8), torch.ones(2, 1, PAGE, 8)
    none = torch.zeros(3, dtype=torch.int32)
    table = torch.zeros(1, 2, dtype=torch.int32)
    mixed = paged_attention(q, cache, cache, table, QueryBlocks(none, none, none - 1, none, 1), scale=1.0)
    assert mixed.shape == (3, 16)

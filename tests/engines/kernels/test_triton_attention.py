"""The Triton kernels of attention over pages, run by Triton's interpreter, against the reference in plain torch."""

import pytest
import torch
from paged_sequences import alone, attend, sequences, tokens_of

from turnwise.engines.kernels.dispatch import interpreted
from turnwise.engines.kernels.paged_attention import QueryBlocks, invariant_size, write_pages

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tried on the GPU")

LENGTHS = [2, 70]


def some(blocks: QueryBlocks, *index: int) -> QueryBlocks:
    """Few blocks, the interpreter being slow."""
    return QueryBlocks(*(x[list(index)] for x in (blocks.first, blocks.count, blocks.slot, blocks.place)), blocks.size)


@pytest.mark.parametrize(
    ("settings", "dtype", "tolerance"),
    [
        ({}, torch.float32, 2e-6),
        ({"window": 9}, torch.float32, 2e-6),
        ({"window": 65, "softcap": 2.0}, torch.float32, 2e-6),
        ({"window": 3, "sinks": torch.linspace(-2, 3, 6)}, torch.float16, 2e-3),
        ({"splits": 3, "window": 66, "sinks": torch.linspace(-2, 3, 6)}, torch.float32, 2e-6),
    ],
)
def test_the_kernel_is_the_reference(settings, dtype, tolerance):
    s = sequences(LENGTHS, heads=(6, 2), dims=(24, 20), dtype=dtype)
    for size, index in ((1, (1, 40, 71)), (5, (0, 14)), (24, (1, 3))):
        blocks = some(s.blocks(size), *index)
        wanted = attend(s, blocks, **settings)
        with interpreted():
            found = attend(s, blocks, **settings)
        for first, count in zip(blocks.first.tolist(), blocks.count.tolist(), strict=True):
            rows = slice(first, first + count)
            torch.testing.assert_close(found[rows], wanted[rows], atol=tolerance, rtol=tolerance)


def test_the_kernel_writes_what_the_reference_writes():
    s = sequences([3, 40], dims=(24, 20))
    slots, places = tokens_of(s.lengths)
    slots[[1, 30]] = -1
    k, v = torch.randn(43, 5, 24)[:, 1:3], torch.randn(43, 5, 20)[:, 3:]
    wanted, found = ([s.keys.clone(), s.values.clone()] for _ in range(2))
    write_pages(*wanted, k, v, s.table, slots, places)
    with interpreted():
        write_pages(*found, k, v, s.table, slots, places)
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    assert not torch.equal(found[0].nan_to_num(7.0), s.keys.nan_to_num(7.0))


def test_a_query_has_the_same_bits_alone_and_in_a_block():
    s = sequences(LENGTHS)
    one, many = s.blocks(1), s.blocks(invariant_size(6, 2))
    with interpreted():
        together = attend(s, some(many, 0, 13, 14), window=66)
        for index in (1, 66, 71):
            assert torch.equal(together[index], alone(s, one, index, window=66)), index


def test_an_empty_block_is_not_looked_at_and_no_block_is_fine():
    s = sequences([3])
    one = s.blocks(3)
    more = QueryBlocks(*(torch.cat((x + 10**6, x)) for x in (one.first, one.count, one.slot, one.place)), size=3)
    more.count[0] = 0
    with interpreted():
        assert torch.equal(attend(s, more), attend(s, one))
        assert torch.equal(attend(s, more, splits=2), attend(s, one, splits=2))
        assert attend(s, some(one)).shape == (3, 96)

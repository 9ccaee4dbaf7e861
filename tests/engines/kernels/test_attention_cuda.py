"""Attention over pages on a GPU: the float32 reference's results, bits that do not depend on the company, graphs."""

import pytest
import torch
from paged_sequences import alone, attend, sequences, tokens_of

from turnwise.engines.kernels.paged_attention import QueryBlocks, invariant_size, write_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTHS = [1, 33, 200, 64, 130]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SHAPES = [
    ((9, 3), (64, 64)),
    ((16, 8), (128, 128)),
    ((12, 2), (128, 128)),
    ((2, 2), (80, 80)),
    ((8, 2), (96, 96)),
    ((16, 1), (256, 256)),
    ((4, 2), (192, 128)),
    ((6, 2), (16, 20)),
]
SETTINGS = [{}, {"window": 50}, {"window": 70, "softcap": 20.0, "sinks": True}]


def check(heads, dims, dtype, size, splits=1, **settings):
    s = sequences(LENGTHS, heads, dims, dtype)
    if settings.pop("sinks", False):
        settings["sinks"] = torch.linspace(-2, 3, heads[0]).to(dtype)
    exact = sequences(LENGTHS, heads, dims, dtype).in_float32()
    wanted = attend(exact, exact.blocks(16), **settings)
    if "sinks" in settings:
        settings["sinks"] = settings["sinks"].cuda()
    there = s.to("cuda")
    found = attend(there, there.blocks(size), splits=splits, **settings).float().cpu()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("heads", "dims"), SHAPES)
def test_the_kernel_is_the_reference_for_every_shape(heads, dims):
    for size in (1, 16):
        check(heads, dims, torch.bfloat16, size)


@pytest.mark.parametrize(("heads", "dims"), [((9, 3), (64, 64)), ((4, 2), (80, 128)), ((8, 1), (256, 256))])
def test_the_kernel_is_the_reference_for_every_number_type(heads, dims):
    check(heads, dims, torch.float32, 16)
    check(heads, dims, torch.float16, 1)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_kernel_is_the_reference_for_every_kind_of_layer(settings):
    for size in (1, 5, 16, 64):
        check((9, 3), (64, 64), torch.bfloat16, size, **settings)


@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_keys_shared_by_several_programs_give_the_same(settings):
    for size in (1, 5):
        check((12, 3), (64, 64), torch.bfloat16, size, splits=4, **settings)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [
        ((9, 3), (64, 64), torch.bfloat16),
        ((16, 8), (128, 128), torch.bfloat16),
        ((2, 2), (80, 80), torch.bfloat16),
        ((12, 2), (128, 128), torch.float32),
    ],
)
def test_a_query_has_the_same_bits_alone_in_any_batch_and_in_a_small_block(heads, dims, dtype):
    s = sequences(LENGTHS, heads, dims, dtype).to("cuda")
    one = s.blocks(1)
    for window in (None, 50):
        together = attend(s, one, window=window)
        assert together.isfinite().all()
        assert torch.equal(together, attend(s, s.blocks(1, order=[4, 2, 0, 3, 1]), window=window)), "another order"
        small = s.blocks(invariant_size(*heads))
        assert torch.equal(together, attend(s, small, window=window)), f"blocks of {small.size}"
        for index in (0, 1, 33, 97, 98, 233, 300, len(together) - 1):
            assert torch.equal(together[index], alone(s, one, index, window=window)), f"row {index} alone"


def test_pages_are_written_as_the_reference_writes_them():
    s = sequences(LENGTHS, dims=(80, 64), dtype=torch.bfloat16)
    slots, places = tokens_of(LENGTHS)
    slots[::7] = -1
    k, v = s.k + 1, s.v + 1
    wanted, found = [s.keys.clone(), s.values.clone()], [s.keys.cuda(), s.values.cuda()]
    write_pages(*wanted, k, v, s.table, slots, places)
    write_pages(*found, k.cuda(), v.cuda(), s.table.cuda(), slots.cuda(), places.cuda())
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.cpu().nan_to_num(7.0))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_graph_follows_its_blocks(splits):
    """Captured once, then with other sequences and with rows that stand idle."""
    s = sequences(LENGTHS, (9, 3), (64, 64), torch.bfloat16).to("cuda")
    ends = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32) - 1
    last = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda") - 1
    slots = torch.arange(len(LENGTHS), dtype=torch.int32, device="cuda")
    blocks = QueryBlocks(ends.clone(), torch.ones_like(ends), slots, last.clone(), 1)
    attend(s, blocks, splits=splits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(s, blocks, splits=splits)
    blocks.first[1:].sub_(7)
    blocks.place[1:].sub_(7)
    blocks.slot[0] = -1
    blocks.count[0] = 0
    out.zero_()
    graph.replay()
    wanted = attend(s, blocks, splits=splits)
    rows = blocks.first[1:].long()
    assert torch.equal(out[rows], wanted[rows])
    assert out[rows].abs().sum() > 0
    assert out[0].abs().sum() == 0

"""Norms, SwiGLU and rotation by Triton: against sums in float64, into pages as into rows, and one row as among many."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from turnwise.engines.kernels import rows
from turnwise.engines.kernels.dispatch import use_triton
from turnwise.engines.kernels.rows import Rotation

CUDA = torch.cuda.is_available()
CLOSE = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (1e-2, 2e-2)}
"""Relative and absolute: bfloat16 has eight bits, and a norm rounds twice."""
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
NORMED = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
COMPANY = (1, 3, 64, 1000) if CUDA else (1, 3, 7)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def agree(run: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], dtype: torch.dtype, device: str) -> None:
    """Results and gradients of `run` in `dtype`, against plain torch's in float64 from the same numbers."""
    given = [x.to(dtype).to(device).requires_grad_() for x in inputs]
    exact = [x.detach().cpu().double().requires_grad_() for x in given]
    made = run(*given)
    wanted = plain(run, exact)
    pulls = [noise(90 + index, *y.shape).to(dtype) for index, y in enumerate(wanted)]
    gradients = torch.autograd.grad(made, given, [pull.to(device) for pull in pulls])
    exact_gradients = torch.autograd.grad(wanted, exact, [pull.double() for pull in pulls])
    close = dict(zip(("rtol", "atol"), CLOSE[dtype], strict=True))
    for index, (y, want) in enumerate(zip(made, wanted, strict=True)):
        torch.testing.assert_close(y.cpu().double(), want, **close, msg=lambda m, i=index: f"result {i}: {m}")
    for index, (g, want) in enumerate(zip(gradients, exact_gradients, strict=True)):
        assert g.dtype == dtype
        size = float(want.abs().max())  # a weight's gradient is a sum over rows: its rounding grows with it
        torch.testing.assert_close(
            g.cpu().double() / size, want / size, **close, msg=lambda m, i=index: f"gradient {i}: {m}"
        )


def plain(run: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    from turnwise.engines.kernels import dispatch

    before = dispatch._interpreted.set(False)
    try:
        assert not use_triton(inputs[0])
        return run(*inputs)
    finally:
        dispatch._interpreted.reset(before)


def rotation_of(heads: int, kv_heads: int, dim: int, length: int, normed: bool) -> Rotation:
    angles = torch.outer(torch.arange(50.0), 10.0 ** -torch.linspace(0, 2, dim // 2))
    norms = [1 + 0.3 * noise(seed, dim) for seed in (41, 42)] if normed else [None, None]
    positions = torch.arange(length) * 7 % 50
    return Rotation(angles.cos(), angles.sin(), positions, *norms, 1e-5, heads, kv_heads, dim)


def on(rotation: Rotation, device: str, dtype: torch.dtype) -> Rotation:
    """The rotation on the device, its norms in `dtype`, its tables as they are."""
    moved = {f.name: x.to(device) for f in fields(rotation) if isinstance(x := getattr(rotation, f.name), Tensor)}
    norms = {name: moved[name].to(dtype) for name in ("q_norm", "k_norm") if name in moved}
    return replace(rotation, **{**moved, **norms})


@TYPES
@pytest.mark.parametrize(("length", "hidden"), [(3, 77), *([(2500, 576), (300, 5000)] if CUDA else [(5, 576)])])
def test_norms_and_their_gradients(device, dtype, length, hidden):
    x, residual, weight = noise(1, length, hidden), noise(2, length, hidden), 1 + 0.3 * noise(3, hidden)
    agree(lambda x, r, w: rows.add_rms_norm(x, r, w, 1e-5), [x, residual, weight], dtype, device)
    if hidden == 77:  # each size is compiled anew
        agree(lambda x, w: rows.add_rms_norm(x, None, w, 1e-5)[:1], [x, weight], dtype, device)


def test_a_norm_whose_stream_or_result_nobody_asks_about(device):
    x, residual, weight = (noise(seed, 4, 24).float().to(device).requires_grad_() for seed in (1, 2, 3))
    weight = weight.detach()[0]
    y, s = rows.add_rms_norm(x, residual, weight, 1e-5)
    (of_stream,) = torch.autograd.grad(s.sum(), x, retain_graph=True)
    assert torch.equal(of_stream, torch.ones_like(x))
    of_result = torch.autograd.grad(y.square().sum(), (x, residual))
    both = torch.autograd.grad(
        *((y2 := rows.add_rms_norm(x, residual, weight, 1e-5))[0].square().sum() + y2[1].sum(), x)
    )
    torch.testing.assert_close(both[0], of_result[0] + of_stream)
    assert torch.equal(of_result[0], of_result[1])


@TYPES
@pytest.mark.parametrize(("length", "size"), [(3, 77), (3000 if CUDA else 2, 1536)])
def test_swiglu_and_its_gradient(device, dtype, length, size):
    agree(lambda x: (rows.swiglu(x),), [3 * noise(5, length, 2 * size)], dtype, device)


@TYPES
@NORMED
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "dim"),
    [(5, 9, 3, 64), (3, 4, 1, 80), (3000, 16, 8, 128) if CUDA else (2, 17, 2, 12)],
)
def test_rotation_and_its_gradient(device, dtype, normed, length, heads, kv_heads, dim):
    rotation = rotation_of(heads, kv_heads, dim, length, normed)

    def run(fused: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        placed = on(rotation, str(fused.device), fused.dtype)
        return rows.rotate(fused, replace(placed, q_norm=norms[0], k_norm=norms[1]) if norms else placed)

    norms = [rotation.q_norm, rotation.k_norm] if normed else []
    agree(run, [noise(6, length, (heads + 2 * kv_heads) * dim), *norms], dtype, device)


@NORMED
def test_gradients_of_a_rotation_come_in_any_layout_or_not_at_all(device, normed):
    rotation = on(rotation_of(4, 2, 16, 3, normed), device, torch.float32)
    fused = noise(6, 3, 8 * 16).float().to(device).requires_grad_()
    pulls = [noise(seed, n, 16, 3).float().to(device).permute(2, 0, 1) for seed, n in ((7, 4), (8, 2), (9, 2))]
    whole = torch.autograd.grad(rows.rotate(fused, rotation), fused, [pull.contiguous() for pull in pulls])[0]
    odd = torch.autograd.grad(rows.rotate(fused, rotation), fused, pulls)[0]
    assert torch.equal(odd, whole)
    parts = []
    for index, pull in enumerate(pulls):
        one = rows.rotate(fused, rotation)[index]
        parts.append(torch.autograd.grad(one, fused, pull)[0])
    assert torch.equal(sum(parts), whole)


@TYPES
@NORMED
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 80)] + [(16, 8, 128)] * CUDA)
def test_into_pages_is_the_same_to_the_bit(device, dtype, normed, heads, kv_heads, dim):
    length, page = 6, 4
    rotation = on(rotation_of(heads, kv_heads, dim, length, normed), device, dtype)
    places = torch.tensor([0, 1, 5, 49, 3, 6], device=device)
    rotation = replace(rotation, positions=places)
    fused = noise(6, length, (heads + 2 * kv_heads) * dim).to(dtype).to(device)
    slots = torch.tensor([0, 0, 1, -1, 1, 0], dtype=torch.int32, device=device)
    table = torch.tensor([[4, 2, -7], [0, 3, -7]], dtype=torch.int32, device=device)
    # A layer's pages may lie among those of other layers.
    keys, values = torch.zeros((5, 2, kv_heads, page, dim), dtype=dtype, device=device).unbind(1)
    q, k, v = rows.rotate(fused, rotation)
    nobody = replace(rotation, positions=places.masked_fill(slots < 0, 10**9))
    found = rows.rotate_into_pages(fused, nobody, keys, values, table, slots)
    kept = [0, 1, 2, 4, 5]
    assert torch.equal(found[kept], q[kept])
    wanted_keys, wanted_values = torch.zeros_like(keys), torch.zeros_like(values)
    for row in kept:
        at = int(table[slots[row], places[row] // page]), slice(None), int(places[row] % page)
        wanted_keys[at], wanted_values[at] = k[row], v[row]
    assert torch.equal(keys, wanted_keys)
    assert torch.equal(values, wanted_values)


@TYPES
@pytest.mark.parametrize("hidden", [576, 77])
def test_a_row_has_the_same_bits_in_any_company(triton_device, dtype, hidden):
    device = triton_device
    many = COMPANY[-1]
    x, residual = (noise(seed, many, hidden).to(dtype).to(device) for seed in (1, 2))
    weight = (1 + 0.3 * noise(3, hidden)).to(dtype).to(device)
    gate_up = noise(4, many, 2 * hidden).to(dtype).to(device)
    rotation = on(rotation_of(9, 3, 20, many, True), device, dtype)
    fused = noise(6, many, 15 * 20).to(dtype).to(device)

    def run(some: slice) -> tuple[Tensor, ...]:
        turned = rows.rotate(fused[some], replace(rotation, positions=rotation.positions[some]))
        normed = rows.add_rms_norm(x[some], residual[some], weight, 1e-5)
        return (*normed, rows.add_rms_norm(x[some], None, weight, 1e-5)[0], rows.swiglu(gate_up[some]), *turned)

    whole = run(slice(None))
    for count in COMPANY[:-1]:
        for first in {0, 1, many - count}:
            for index, (part, all_of_it) in enumerate(zip(run(slice(first, first + count)), whole, strict=True)):
                assert torch.equal(part, all_of_it[first : first + count]), (index, first, count)


def test_the_same_gradient_when_it_is_recomputed(device):
    x, residual = (noise(seed, 3, 40).float().to(device).requires_grad_() for seed in (1, 2))
    weight = (1 + 0.3 * noise(3, 40)).float().to(device).requires_grad_()
    rotation = on(rotation_of(2, 1, 10, 3, True), device, torch.float32)

    def layer(x: Tensor, residual: Tensor) -> Tensor:
        y, s = rows.add_rms_norm(x, residual, weight, 1e-5)
        q, k, v = rows.rotate(y, rotation)
        return rows.swiglu(torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), 1)) + s[:, :20]

    plain_gradients = torch.autograd.grad(layer(x, residual).square().sum(), (x, residual, weight))
    again = torch.autograd.grad(
        checkpoint(layer, x, residual, use_reentrant=False).square().sum(), (x, residual, weight)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain_gradients, again, strict=True))


def test_without_rows_there_is_nothing_to_do(device):
    x, weight = torch.zeros((0, 8), device=device, requires_grad=True), torch.ones(8, device=device, requires_grad=True)
    y, s = rows.add_rms_norm(x, x * 1, weight, 1e-5)
    assert y.shape == s.shape == (0, 8)
    (to_weight,) = torch.autograd.grad(y.sum() + rows.swiglu(y).sum(), weight)
    assert torch.equal(to_weight, torch.zeros(8, device=device))
    rotation = on(rotation_of(2, 1, 2, 0, False), device, torch.float32)
    assert [len(part) for part in rows.rotate(x, rotation)] == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_captured_in_a_graph_the_bits_are_the_same():
    x, residual = (noise(seed, 64, 576).bfloat16().cuda() for seed in (1, 2))
    weight = torch.ones(576, dtype=torch.bfloat16, device="cuda")
    rotation = on(rotation_of(5, 2, 64, 64, False), "cuda", torch.bfloat16)
    keys, values = (torch.zeros((8, 2, 32, 64), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(4, 2)
    slots = (torch.arange(64, device="cuda") % 4).int()

    def run() -> tuple[Tensor, ...]:
        y, s = rows.add_rms_norm(x, residual, weight, 1e-5)
        return y, s, rows.swiglu(y), rows.rotate_into_pages(y, rotation, keys, values, table, slots)

    with torch.inference_mode():
        wanted = run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = run()
        graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
    assert keys.abs().sum() > 0

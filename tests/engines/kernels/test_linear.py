"""Products of rows with a weight: against sums in float64, and a row's bits in any company."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from turnwise.engines.kernels.dispatch import interpreted
from turnwise.engines.kernels.linear import invariant_linear, linear
from turnwise.errors import EngineError

CUDA = torch.cuda.is_available()
NARROW = torch.bfloat16 if CUDA else torch.float16
"""Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers."""
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
COMPANY = (1, 3, 64, 1000) if CUDA else (1, 3, 67)
FORMATS = pytest.mark.parametrize(
    ("dtype", "out"),
    [(torch.float32, None), (NARROW, None), (NARROW, torch.float32)],
    ids=["float32", "narrow", "wide"],
)
SHAPES = pytest.mark.parametrize(("length", "depth", "size"), [(5, 70, 130), (67, 128, 20)] + [(1000, 576, 960)] * CUDA)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def agree(product, device: str, dtype: torch.dtype, out: torch.dtype | None, shape: tuple[int, int, int]) -> None:
    """Result and gradients, each against float64 from the same numbers, as a share of the largest."""
    length, depth, size = shape
    inputs = [noise(1, length, depth), noise(2, size, depth), noise(3, size)]
    given = [x.to(dtype).to(device).requires_grad_() for x in inputs]
    exact = [x.detach().cpu().double().requires_grad_() for x in given]
    made = product(*given, out)
    wanted = functional.linear(*exact)
    pull = noise(4, length, size).to(dtype)
    gradients = torch.autograd.grad(made, given, pull.to(made.dtype).to(device))
    exact_gradients = torch.autograd.grad(wanted, exact, pull.double())
    assert made.dtype == (out or dtype)
    close = CLOSE[torch.float32 if out else dtype]
    off = float((made.cpu().double() - wanted).detach().abs().max()) / float(wanted.detach().abs().max())
    assert off <= close
    for index, (found, want) in enumerate(zip(gradients, exact_gradients, strict=True)):
        off = float((found.cpu().double() - want).abs().max()) / float(want.abs().max())
        assert off <= CLOSE[dtype], (index, off)
    with torch.no_grad():
        bare = product(given[0], given[1], None, out)
        assert float((bare.cpu().double() - exact[0] @ exact[1].T).abs().max()) <= close * float(wanted.abs().max())


@FORMATS
@SHAPES
def test_the_invariant_product_and_its_gradient(triton_device, dtype, out, length, depth, size):
    agree(invariant_linear, triton_device, dtype, out, (length, depth, size))


@FORMATS
def test_torchs_own_product_and_its_gradient(fast_device, dtype, out):
    agree(linear, fast_device, dtype, out, (5, 64, 48))


@FORMATS
def test_without_triton_the_invariant_product_is_torchs(dtype, out):
    agree(invariant_linear, "cpu", dtype, out, (5, 70, 13))


@FORMATS
@pytest.mark.parametrize(("depth", "size"), [(128, 48), (70, 131)] + [(1536, 576), (576, 3072)] * CUDA)
def test_a_row_has_the_same_bits_in_any_company(triton_device, dtype, out, depth, size):
    many = COMPANY[-1]
    x = noise(1, many, depth).to(dtype).to(triton_device)
    weight, bias = noise(2, size, depth).to(dtype).to(triton_device), noise(3, size).to(dtype).to(triton_device)
    whole = invariant_linear(x, weight, bias, out)
    for count in COMPANY[:-1]:
        for first in sorted({0, 1, many - count}):
            alone = invariant_linear(x[first : first + count], weight, bias, out)
            assert torch.equal(alone, whole[first : first + count]), (first, count)


def test_a_product_of_no_rows(triton_device):
    x, weight = torch.zeros((0, 8), device=triton_device), torch.ones((3, 8), device=triton_device, requires_grad=True)
    made = invariant_linear(x, weight)
    assert made.shape == (0, 3)
    assert torch.equal(torch.autograd.grad(made.sum(), weight)[0], torch.zeros_like(weight))


def test_the_interpreter_must_be_asked_for_in_time(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(EngineError, match="TRITON_INTERPRET=1"), interpreted():
        pass

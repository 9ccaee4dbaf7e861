"""The gradients of norms, SwiGLU and rotation as plain functions: by Triton as by the reference, whatever the strides."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from turnwise.engines.kernels.dispatch import interpreted
from turnwise.engines.kernels.row_gradients import norm_gradient, rotate_gradient, swiglu_gradient
from turnwise.engines.kernels.rows import Rotation

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [pytest.mark.gpu] if CUDA else []
ROWS = (1, 7, 3000) if CUDA else (1, 7)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_triton(function, *given):  # type: ignore[no-untyped-def]
    """On a GPU, or in the interpreter; the answer on the CPU."""
    with nullcontext() if CUDA else interpreted():
        made = function(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in given))
    made = made if isinstance(made, tuple) else (made,)
    return [None if x is None else x.cpu() for x in made]


def agree(found: list[Tensor | None], expected: tuple[Tensor | None, ...]) -> None:
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, rtol=2e-4, atol=2e-4 * float(two.abs().max()))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("wanted", [True, False])
def test_a_norm(rows: int, wanted: bool) -> None:
    given = (noise(1, rows, 48), noise(2, 48), 1e-5, noise(3, 48, rows).t(), noise(4, rows, 48), wanted)
    agree(by_triton(norm_gradient, *given), norm_gradient(*given))


@pytest.mark.parametrize("rows", ROWS)
def test_swiglu(rows: int) -> None:
    given = (noise(1, rows, 80), noise(2, 40, rows).t())
    agree(by_triton(swiglu_gradient, *given), (swiglu_gradient(*given),))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_rotation(rows: int, normed: bool) -> None:
    angles, places = noise(1, 16, 5), torch.arange(rows) % 16

    def rotation(device: str) -> Rotation:
        norms = (noise(2, 10).to(device), noise(3, 10).to(device)) if normed else (None, None)
        return Rotation(angles.cos().to(device), angles.sin().to(device), places.to(device), *norms, 1e-5, 4, 2, 10)

    # Heads outside rows, as an attention over rectangles gives its gradients back.
    pulls = (noise(4, 4, rows, 10).transpose(0, 1), noise(5, 2, rows, 10).transpose(0, 1), noise(6, rows, 2, 10))
    fused = noise(7, rows, 80) if normed else None
    agree(by_triton(rotate_gradient, fused, rotation(DEVICE), *pulls), rotate_gradient(fused, rotation("cpu"), *pulls))

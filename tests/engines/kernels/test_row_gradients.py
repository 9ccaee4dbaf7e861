"""The gradients of norms, SwiGLU and rotation as plain functions: by Triton as by the reference, whatever the strides."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from turnwise.engines.kernels.dispatch import interpreted
from turnwise.engines.kernels.row_gradients import (
    added_up,
    head_parts,
    norm_gradient,
    norm_parts,
    rotate_gradient,
    swiglu_gradient,
)
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


def copied(given):  # type: ignore[no-untyped-def]
    """With tensors of one's own, strides kept: a gradient may use up what it is given."""
    return [torch.empty_like(x).copy_(x) if isinstance(x, Tensor) else x for x in given]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("reuse", [True, False])
def test_norms_one_of_them_over_fewer_rows(rows: int, wanted: bool, reuse: bool) -> None:
    first = (noise(1, rows, 48), noise(2, 48), 1e-5, noise(3, 48, rows).t(), noise(4, rows, 48))
    second = (noise(5, 1, 48), noise(6, 48), 1e-5, noise(7, 1, 48), None)

    def run(weight: Tensor, *both):  # type: ignore[no-untyped-def]
        parts = norm_parts(2, rows, weight)
        given = [copied(both[:5]), copied(both[5:])]
        made = [norm_gradient(*some, parts[n] if wanted else None, reuse=reuse) for n, some in enumerate(given)]
        if not reuse:
            assert all(torch.equal(some[3], both[3 + 5 * n]) for n, some in enumerate(given))
        return (*made, *(added_up(parts, weight.dtype) if wanted else ()))

    agree(by_triton(run, first[1], *first, *second), run(first[1], *first, *second))


@pytest.mark.parametrize("rows", ROWS)
def test_swiglu(rows: int) -> None:
    given = (noise(1, rows, 80), noise(2, 40, rows).t())
    agree(by_triton(swiglu_gradient, *copied(given)), (swiglu_gradient(*given),))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_rotations(rows: int, normed: bool) -> None:
    angles, places = noise(1, 16, 5), torch.arange(rows) % 16
    # Heads outside rows, as an attention over rectangles gives its gradients back.
    pulls = (noise(4, 4, rows, 10).transpose(0, 1), noise(5, 2, rows, 10).transpose(0, 1), noise(6, rows, 2, 10))

    def run(fused: Tensor, *pulls: Tensor) -> tuple[Tensor, ...]:
        norms = (noise(2, 10).to(fused), noise(3, 10).to(fused)) if normed else (None, None)
        turn = (angles.cos().to(fused), angles.sin().to(fused), places.to(fused.device))
        rotation = Rotation(*turn, *norms, 1e-5, 4, 2, 10)
        parts = head_parts(2, rows, rotation) if normed else None
        made = [rotate_gradient(fused.clone(), rotation, *pulls, None if parts is None else parts[n]) for n in (0, 1)]
        assert torch.equal(*made)
        return (made[0], *(added_up(parts, fused.dtype) if parts is not None else ()))

    agree(by_triton(run, noise(7, rows, 80), *pulls), run(noise(7, rows, 80), *pulls))

"""The two steps of a layer's training: their gradients against numeric ones, with and without frozen weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from turnwise.engines.kernels.rows import Rotation
from turnwise.engines.model.fused_layer import after_attention, before_attention

ROWS, HIDDEN, INNER, HEADS, KV, DIM = 5, 6, 7, 4, 2, 4


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def rotation_of(normed: bool) -> Rotation:
    angles = torch.linspace(0.0, 3.0, 8 * DIM // 2).view(8, -1)
    norms = (noise(DIM, seed=1), noise(DIM, seed=2)) if normed else (None, None)
    return Rotation(angles.cos(), angles.sin(), torch.tensor([0, 1, 2, 0, 7]), *norms, 1e-5, HEADS, KV, DIM)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("first", [False, True], ids=["added", "first"])
@pytest.mark.parametrize("invariant", [False, True])
def test_the_gradient_before_attention(normed: bool, first: bool, invariant: bool) -> None:
    width = (HEADS + 2 * KV) * DIM
    rotation = rotation_of(normed)
    added = () if first else (noise(ROWS, HIDDEN, seed=4),)
    norms = (rotation.q_norm, rotation.k_norm) if normed else ()

    def run(x: Tensor, norm: Tensor, qkv: Tensor, bias: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        turn = replace(rotation, q_norm=more[-2], k_norm=more[-1]) if normed else rotation
        return before_attention(x, None if first else more[0], norm, qkv, bias, turn, invariant)

    given = (noise(ROWS, HIDDEN), noise(HIDDEN), noise(width, HIDDEN), noise(width), *added, *norms)
    assert torch.autograd.gradcheck(run, given, atol=1e-6)


@pytest.mark.parametrize("invariant", [False, True])
def test_the_gradient_after_attention(invariant: bool) -> None:
    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        return after_attention(*given, 1e-5, invariant)

    given = (
        noise(ROWS, HIDDEN), noise(ROWS, HEADS * DIM), noise(HIDDEN, HEADS * DIM), noise(HIDDEN), noise(HIDDEN, seed=3),
        noise(2 * INNER, HIDDEN), noise(HIDDEN, INNER),
    )  # fmt: skip
    assert torch.autograd.gradcheck(run, given, atol=1e-6)


def test_frozen_weights_get_no_gradient_and_the_rest_the_same() -> None:
    x, mixed, bias = noise(ROWS, HIDDEN), noise(ROWS, HEADS * DIM), None
    weights = [
        noise(HIDDEN, HEADS * DIM), noise(HIDDEN, seed=3), noise(2 * INNER, HIDDEN), noise(HIDDEN, INNER)
    ]  # fmt: skip
    found = []
    for frozen in (False, True):
        output, norm, gate_up, down = (w.detach().requires_grad_(not frozen) for w in weights)
        s, end = after_attention(x, mixed, output, bias, norm, gate_up, down, 1e-5, False)
        (s.sin().sum() + end.cos().sum()).backward()
        assert [w.grad is None for w in (output, norm, gate_up, down)] == [frozen] * 4
        found.append((x.grad, mixed.grad))
        x.grad = mixed.grad = None
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))

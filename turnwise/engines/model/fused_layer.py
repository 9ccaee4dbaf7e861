"""A decoder layer's training in two steps with a backward of their own: all before the attention, and all behind it.

A GPU is faster than a CPU can tell it what to do: torch's bookkeeping for a dozen small steps a layer took longer than
the steps. Backward keeps what it needs of the products' inputs; nothing is computed twice.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.engines.kernels.products import invariant_linear, linear
from turnwise.engines.kernels.row_gradients import norm_gradient, rotate_gradient, swiglu_gradient
from turnwise.engines.kernels.rows import Rotation, add_rms_norm, rotate, swiglu


def before_attention(
    x: Tensor,
    added: Tensor | None,
    norm: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    rotation: Rotation,
    invariant: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stream x + added, and the queries, keys and values that its norm makes, turned to their positions."""
    q_norm, k_norm = rotation.q_norm, rotation.k_norm
    made = cast(Any, _BeforeAttention).apply(x, added, norm, qkv, bias, q_norm, k_norm, rotation, invariant)
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], made)


def after_attention(
    x: Tensor,
    mixed: Tensor,
    output: Tensor,
    bias: Tensor | None,
    norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    eps: float,
    invariant: bool,
) -> tuple[Tensor, Tensor]:
    """The stream with the attention's product added, and what the MLP adds to it."""
    made = cast(Any, _AfterAttention).apply(x, mixed, output, bias, norm, gate_up, down, eps, invariant)
    return cast(tuple[Tensor, Tensor], made)


class _BeforeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        norm: Tensor,
        qkv: Tensor,
        bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        rotation: Rotation,
        invariant: bool,
    ) -> tuple[Tensor, ...]:
        y, s = add_rms_norm(x, added, norm, rotation.eps)
        fused = (invariant_linear if invariant else linear)(y, qkv, bias)
        ctx.rotation = rotation
        ctx.save_for_backward(s, y, norm, qkv, None if q_norm is None else fused)
        return s, *rotate(fused, rotation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        s, y, norm, qkv, fused = ctx.saved_tensors
        needs = ctx.needs_input_grad
        by_s, by_q, by_k, by_v = gradients
        by_fused, to_q_norm, to_k_norm = rotate_gradient(fused, ctx.rotation, by_q, by_k, by_v)
        to_qkv, to_bias = _weight_gradient(by_fused, y, needs[3], needs[4])
        to_x, to_norm = norm_gradient(s, norm, ctx.rotation.eps, torch.mm(by_fused, qkv), by_s, needs[2])
        return to_x, to_x if needs[1] else None, to_norm, to_qkv, to_bias, to_q_norm, to_k_norm, None, None


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mixed: Tensor,
        output: Tensor,
        bias: Tensor | None,
        norm: Tensor,
        gate_up: Tensor,
        down: Tensor,
        eps: float,
        invariant: bool,
    ) -> tuple[Tensor, Tensor]:
        product = invariant_linear if invariant else linear
        y, s = add_rms_norm(x, product(mixed, output, bias), norm, eps)
        wide = product(y, gate_up)
        inner = swiglu(wide)
        ctx.eps = eps
        ctx.save_for_backward(mixed, s, y, wide, inner, output, norm, gate_up, down)
        return s, product(inner, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mixed, s, y, wide, inner, output, norm, gate_up, down = ctx.saved_tensors
        needs = ctx.needs_input_grad
        by_s, by_end = gradients
        to_down, _ = _weight_gradient(by_end, inner, needs[6])
        by_wide = swiglu_gradient(wide, torch.mm(by_end, down))
        to_gate_up, _ = _weight_gradient(by_wide, y, needs[5])
        to_x, to_norm = norm_gradient(s, norm, ctx.eps, torch.mm(by_wide, gate_up), by_s, needs[4])
        to_output, to_bias = _weight_gradient(to_x, mixed, needs[2], needs[3])
        return to_x, torch.mm(to_x, output), to_output, to_bias, to_norm, to_gate_up, to_down, None, None


def _weight_gradient(
    by_product: Tensor, x: Tensor, wants_weight: bool, wants_bias: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Of a product's weight and bias, in their number format."""
    to_weight = torch.mm(by_product.t(), x) if wants_weight else None
    return to_weight, by_product.sum(0) if wants_bias else None

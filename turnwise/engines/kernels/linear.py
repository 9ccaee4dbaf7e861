"""Products of rows with a weight: torch's own, and one whose rows come out the same bits in any company."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from turnwise.engines.kernels.dispatch import use_triton


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus the bias, by torch's fastest way; a row's bits may depend on T.

    `out_dtype` float32 keeps the sums of narrower factors as they are, without rounding them first.
    """
    if out_dtype is None or out_dtype == x.dtype:
        return functional.linear(x, weight, bias)
    if x.is_cuda:
        return cast(Tensor, cast(Any, _WideLinear).apply(x, weight, bias, out_dtype))
    return _plain(x, weight, bias, out_dtype)


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The same product by one fixed tile and one order of sums: a row's bits depend on that row and the weight alone.

    That holds on a GPU; elsewhere it is torch's own product. The bias is added before the one rounding.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if use_triton(x):
        if not torch.is_grad_enabled():
            from turnwise.engines.kernels.triton import linear as triton_linear

            return triton_linear.product(x, weight, bias, out_dtype)
        return cast(Tensor, cast(Any, _InvariantLinear).apply(x, weight, bias, out_dtype))
    return _plain(x, weight, bias, out_dtype)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    product = functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    return product.to(out_dtype)


class _Product(torch.autograd.Function):
    """The gradient of a product, in the number format of its factors."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = gradients[0].to(x.dtype)
        to_x = g @ weight if ctx.needs_input_grad[0] else None
        to_weight = g.t() @ x if ctx.needs_input_grad[1] else None
        to_bias = gradients[0].float().sum(0).to(x.dtype) if ctx.needs_input_grad[2] else None
        return to_x, to_weight, to_bias, None


class _WideLinear(_Product):
    """torch's product with the sums of bfloat16 or float16 factors kept in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        product = torch.mm(x, weight.t(), out_dtype=out_dtype)
        return product if bias is None else product.add_(bias)


class _InvariantLinear(_Product):
    """The linear product by Triton's kernel, whose rows do not depend on the other rows of a batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        from turnwise.engines.kernels.triton import linear as triton_linear

        ctx.save_for_backward(x, weight)
        return triton_linear.product(x, weight, bias, out_dtype)

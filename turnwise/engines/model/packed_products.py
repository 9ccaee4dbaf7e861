"""Weights laid out once for the CPU's products, where torch can: twice as fast for few rows, rounded otherwise."""

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 16
"""The number of rows the layout is made for; others work as well."""
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far a product may be from the plain one, as a share of its largest number."""


def pack(weight: Tensor) -> Tensor | None:
    """The weight [out, in] in a layout for `packed_linear`; None where this torch or this number format has none.

    The operators are those that torch's own compiler takes; they are tried out, since nothing documents them.
    """
    ops = torch.ops.mkldnn
    known = hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")
    if not known or weight.dtype not in CLOSE:
        return None
    try:
        packed: Tensor = ops._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        x = torch.linspace(-1.0, 1.0, 2 * weight.shape[1], dtype=torch.float32).view(2, -1).to(weight.dtype)
        found, plain = packed_linear(x, packed, None), functional.linear(x, weight.detach())
    except (RuntimeError, NotImplementedError, TypeError):  # not built for this processor
        return None
    off = (found.float() - plain.float()).abs().max()
    return packed if off <= CLOSE[weight.dtype] * plain.float().abs().max().clamp(min=1e-6) else None


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] times a packed weight, plus the bias; without gradient."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return made

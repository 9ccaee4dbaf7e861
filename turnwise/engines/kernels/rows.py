"""What a decoder does to each row alone: norms, SwiGLU, rotary positions; a row's bits never depend on the others.

T tokens (rows), H hidden size, I size of the MLP, Hq and Hkv heads of queries and of keys, D head size.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from turnwise.engines.kernels.dispatch import use_triton


@dataclass(frozen=True, eq=False)
class Rotation:
    """How queries and keys are turned: rotary tables, the rows' positions, and a norm of each head if there is one."""

    cos: Tensor
    """[P, D/2] float32; row p is for position p."""
    sin: Tensor
    positions: Tensor
    """[T], int32 or int64, each below P."""
    q_norm: Tensor | None
    """[D]: the weight of an RMS norm of each query head before it turns; there with `k_norm` or not at all."""
    k_norm: Tensor | None
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("queries and keys have a norm both or neither")

    def with_norms(self, q_norm: Tensor, k_norm: Tensor) -> "Rotation":
        """The same with other weights of the norms."""
        return replace(self, q_norm=q_norm, k_norm=k_norm)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, reuse: bool = False
) -> tuple[Tensor, Tensor]:
    """(y, s) of x [T, H]: s = x + residual, and y = s over its root mean square, rounded, times the weight.

    Without a residual s is x itself. With `reuse`, where no gradient is asked for, s may lie where the residual was.
    """
    if use_triton(x):
        from turnwise.engines.kernels.triton import rows as triton_rows

        return triton_rows.add_rms_norm(x, residual, weight, eps, reuse)
    s = x if residual is None else x + residual
    wide = s.to(_wide(s))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(s.dtype) * weight, s


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [T, I] of gate and up side by side [T, 2I]; rounded once, at the end."""
    if use_triton(gate_up):
        from turnwise.engines.kernels.triton import rows as triton_rows

        return triton_rows.swiglu(gate_up)
    gate, up = gate_up.to(_wide(gate_up)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def rotate(fused: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, Hq, D] and keys [T, Hkv, D] turned to their positions, and values [T, Hkv, D] as they are.

    `fused` [T, (Hq + 2 Hkv) * D] holds the three in this order; the values may come back as a view of it.
    """
    if use_triton(fused):
        from turnwise.engines.kernels.triton import rotation as triton_rotation

        return triton_rotation.rotate(fused, rotation)
    counts = [rotation.num_heads, rotation.num_kv_heads, rotation.num_kv_heads]
    q, k, v = torch.split(fused.view(len(fused), sum(counts), rotation.head_dim), counts, dim=1)
    return _turned(q, rotation.q_norm, rotation), _turned(k, rotation.k_norm, rotation), v


def rotate_into_pages(
    fused: Tensor, rotation: Rotation, keys: Tensor, values: Tensor, table: Tensor, slots: Tensor
) -> Tensor:
    """The queries of `rotate`, without gradient; keys and values go straight into the pages of their sequences.

    Pages are [pages, Hkv, PAGE, D]; `table` [slots, max_pages] int32 names those of a sequence in order, `slots` [T]
    int32 the sequence of each row. A row of slot -1 is nobody's: nothing is written, its position is never looked at.
    """
    if use_triton(fused):
        from turnwise.engines.kernels.triton import rotation as triton_rotation

        return triton_rotation.rotate_into_pages(fused, rotation, keys, values, table, slots)
    with torch.no_grad():
        used = slots >= 0
        places = torch.where(used, rotation.positions, 0).long()
        q, k, v = rotate(fused, replace(rotation, positions=places))
        page, within = places[used] // keys.shape[2], places[used] % keys.shape[2]
        pages = table[slots[used].long(), page].long()
        keys[pages, :, within] = k[used]
        values[pages, :, within] = v[used]
        return q


def _turned(heads: Tensor, norm: Tensor | None, rotation: Rotation) -> Tensor:
    """Heads [T, N, D] normed where there is a norm, then turned in pairs (i, i + D/2); rounded once."""
    wide = heads.to(_wide(heads))
    if norm is not None:
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + rotation.eps)
        wide = wide * scale * norm.to(wide.dtype)
    cos = rotation.cos[rotation.positions.long()].unsqueeze(1)
    sin = rotation.sin[rotation.positions.long()].unsqueeze(1)
    first, second = wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def _wide(x: Tensor) -> torch.dtype:
    """The number format of the sums: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)

"""Norms and SwiGLU as Triton kernels, forward and backward; one row's sums have one shape, whatever T is.

Nothing that depends on T is compiled in, and every row starts where vectors can be loaded (`ready`): the compiler may
choose another order of sums for a count of one or for an odd address.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.engines.kernels.triton.launch import Launcher

PROGRAMS = 924
"""Programs with two warps each that sum a norm's gradient, each over its share of the rows: 7 for each of 132 cores, as
many as their registers hold. It is fixed, so that a gradient has the same bits on every GPU.
"""


def ready(x: Tensor) -> Tensor:
    """x in rows without gaps, at an address that vectors can be loaded from."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, reuse: bool) -> tuple[Tensor, Tensor]:
    """The Triton kernel of `rows.add_rms_norm`, with the same arguments and results."""
    if not torch.is_grad_enabled():
        return norm(x, residual, weight, eps, reuse=reuse)
    if residual is None:
        return _Norm.apply(x, weight, eps), x
    return _AddNorm.apply(x, residual, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """The Triton kernel of `rows.swiglu`, with the same arguments and results."""
    return _SwiGlu.apply(gate_up) if torch.is_grad_enabled() else gated(ready(gate_up))


@triton.jit
def _norm_forward(X, R, W, Y, S, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    x = tl.load(X + row * H + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(W + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        r = tl.load(R + row * H + column, mask=inside, other=0.0).to(tl.float32)
        s = (x + r).to(S.dtype.element_ty)
        tl.store(S + row * H + column, s, mask=inside)
        x = s.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) * (1.0 / H) + eps)
    scaled = (x * scale).to(Y.dtype.element_ty).to(tl.float32)
    tl.store(Y + row * H + column, (scaled * w).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _norm_backward(
    S, W, GY, GS, GX, PARTS, T, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, TO_WEIGHT: tl.constexpr
):  # fmt: skip
    """With n = s * scale and g the gradient of n: d s = scale * (g - n * mean(g * n)) + the stream's own gradient."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < H
    w = tl.load(W + column, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros([BLOCK], dtype=tl.float32)
    start = program.to(tl.int64)
    # The next row is on its way while this one is worked on; a program may have no row at all.
    first = inside & (start < T)
    next_s = tl.load(S + start * H + column, mask=first, other=0.0)
    next_gy = tl.load(GY + start * H + column, mask=first, other=0.0)
    if ADD:
        next_gs = tl.load(GS + start * H + column, mask=first, other=0.0)
    for turn in range(0, tl.cdiv(T - program, programs)):
        row = start + turn * programs
        s = next_s.to(tl.float32)
        gy = next_gy.to(tl.float32)
        if ADD:
            gs = next_gs.to(tl.float32)
        ahead = (row + programs) * H + column
        there = inside & (row + programs < T)
        next_s = tl.load(S + ahead, mask=there, other=0.0)
        next_gy = tl.load(GY + ahead, mask=there, other=0.0)
        if ADD:
            next_gs = tl.load(GS + ahead, mask=there, other=0.0)
        g = gy * w
        scale = tl.rsqrt(tl.sum(s * s, axis=0) * (1.0 / H) + eps)
        share = tl.sum(g * s, axis=0) * (1.0 / H) * scale
        n = s * scale
        if TO_WEIGHT:
            part += gy * n
        gx = (g - n * share) * scale
        if ADD:
            gx += gs
        tl.store(GX + row * H + column, gx.to(GX.dtype.element_ty), mask=inside)
    if TO_WEIGHT:
        tl.store(PARTS + start * H + column, part, mask=inside)


@triton.jit(do_not_specialize=["T"])
def _column_sums(
    PARTS, SUMS, T, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    which = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = ((tl.program_id(0) % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    row = tl.arange(0, ROWS)[:, None]
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for turn in range(0, tl.cdiv(T, ROWS)):
        here = turn * ROWS + row
        sums += tl.load(PARTS + (which * T + here) * H + column, mask=(here < T) & (column < H), other=0.0)
    total = tl.sum(sums, axis=0)[None, :]
    tl.store(SUMS + which * H + column, total.to(SUMS.dtype.element_ty), mask=column < H)


@triton.jit
def _swiglu_forward(GATE_UP, Y, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    column = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(GATE_UP + row * (2 * SIZE) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * (2 * SIZE) + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(Y + row * SIZE + column, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(GATE_UP, GY, G, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    column = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    here = row * (2 * SIZE) + column
    gate = tl.load(GATE_UP + here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + here + SIZE, mask=inside, other=0.0).to(tl.float32)
    gy = tl.load(GY + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    to_gate = gy * up * share * (1.0 + gate * (1.0 - share))
    tl.store(G + here, to_gate.to(G.dtype.element_ty), mask=inside)
    tl.store(G + here + SIZE, (gy * gate * share).to(G.dtype.element_ty), mask=inside)


_launch_norm_forward, _launch_norm_backward = Launcher(_norm_forward), Launcher(_norm_backward)
_launch_column_sums = Launcher(_column_sums)
_launch_swiglu_forward, _launch_swiglu_backward = Launcher(_swiglu_forward), Launcher(_swiglu_backward)


@cache
def _width(columns):
    """(block, warps) for a row that one program holds whole."""
    block = triton.next_power_of_2(columns)
    return block, min(max(block // 512, 1), 16)


@cache
def _blocks(columns):
    """(block, blocks, warps) for a row that several programs share; smaller ones where large ones would lie empty."""
    block = 1024 if triton.cdiv(columns, 1024) * 1024 * 4 <= columns * 5 else 512
    block = min(block, max(triton.next_power_of_2(columns), 16))
    return block, triton.cdiv(columns, block), max(block // 256, 1)


def column_sums(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums [N, H] of parts [N, P, H], without gaps in float32; in the same order whatever the GPU."""
    count, rows, columns = parts.shape
    sums = torch.empty((count, columns), dtype=dtype, device=parts.device)
    blocks = -(-columns // 16)
    if count:
        _launch_column_sums(count * blocks, (parts, sums), (rows,), (columns, 512, 16, blocks), num_warps=8)
    return sums


def norm_parts(norms: int, rows: int, weight: Tensor) -> Tensor:
    """Room [N, P, H] for what programs sum of the gradients of several norms' weights, over at most so many rows."""
    programs = max(PROGRAMS * 2 // max(_width(len(weight))[1], 2), 1)
    return torch.empty((norms, min(rows, programs), len(weight)), dtype=torch.float32, device=weight.device)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, reuse: bool = False
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` without a gradient."""
    x, weight, add = ready(x), ready(weight), residual is not None
    residual = ready(residual) if add else x
    y = torch.empty_like(x)
    s = residual if reuse or not add else torch.empty_like(x)
    rows, columns = x.shape
    block, warps = _width(columns)
    if rows:
        _launch_norm_forward(rows, (x, residual, weight, y, s), (eps,), (columns, block, add), num_warps=warps)
    return y, s


def norm_gradient(
    s: Tensor, weight: Tensor, eps: float, gy: Tensor, gs: Tensor | None, parts: Tensor | None, *, reuse: bool = False
) -> Tensor:
    """The gradient of the stream; `parts` [P, H] takes the weight's, as sums of P programs.

    With `reuse` it may lie where `gy` was.
    """
    s, weight, gy = ready(s), ready(weight), ready(gy)
    gs = None if gs is None else ready(gs)
    rows, columns = s.shape
    block, warps = _width(columns)
    gx = gy if reuse else torch.empty_like(s)
    programs = min(rows, max(PROGRAMS * 2 // max(warps, 2), 1)) if parts is None else len(parts)
    if programs:
        _launch_norm_backward(
            programs, (s, weight, gy, s if gs is None else gs, gx, s if parts is None else parts), (rows, eps),
            (columns, block, gs is not None, parts is not None), num_warps=warps,
        )  # fmt: skip
    return gx


def gated(gate_up: Tensor) -> Tensor:
    """`swiglu` without a gradient, of a tensor that is `ready`."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty((rows, columns))
    block, blocks, warps = _blocks(columns)
    if rows:
        _launch_swiglu_forward(rows * blocks, (gate_up, y), (), (columns, block, blocks), num_warps=warps)
    return y


def gated_gradient(gate_up: Tensor, gy: Tensor, *, reuse: bool = False) -> Tensor:
    """The gradient of gate and up; with `reuse` in their place."""
    gy = ready(gy)
    rows, columns = gy.shape
    block, blocks, warps = _blocks(columns)
    gradient = gate_up if reuse else torch.empty_like(gate_up)
    if rows:
        _launch_swiglu_backward(rows * blocks, (gate_up, gy, gradient), (), (columns, block, blocks), num_warps=warps)
    return gradient


class _Norm(torch.autograd.Function):
    """A norm without a residual; nothing is kept but its input."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, _ = norm(x, None, weight, eps)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        parts = norm_parts(1, len(x), weight) if ctx.needs_input_grad[1] else None
        gx = norm_gradient(x, weight, ctx.eps, gy, None, None if parts is None else parts[0])
        return gx, None if parts is None else column_sums(parts, weight.dtype)[0], None


class _AddNorm(torch.autograd.Function):
    """A residual sum and its norm; nothing is kept but the sum, which the caller has anyway."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        y, s = norm(x, residual, weight, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(s, weight)
        ctx.eps = eps
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx, gy, gs):
        s, weight = ctx.saved_tensors
        if gy is None:
            return gs, gs, None, None
        parts = norm_parts(1, len(s), weight) if ctx.needs_input_grad[2] else None
        gx = norm_gradient(s, weight, ctx.eps, gy, gs, None if parts is None else parts[0])
        return gx, gx, None if parts is None else column_sums(parts, weight.dtype)[0], None


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up; nothing is kept but its input."""

    @staticmethod
    def forward(ctx, gate_up):
        gate_up = ready(gate_up)
        ctx.save_for_backward(gate_up)
        return gated(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx, gy):
        return gated_gradient(ctx.saved_tensors[0], gy)

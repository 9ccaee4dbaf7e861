"""Rotary positions and the norm of heads as Triton kernels: forward, forward into pages, and backward.

A program holds a tile of heads of one row as its two halves, so that the pairs (i, i + D/2) lie beside each other. Into
pages or not is one kernel with two endings, so that both give the same bits.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.engines.kernels.rows import Rotation
from turnwise.engines.kernels.triton.launch import Launcher
from turnwise.engines.kernels.triton.rows import column_sums, ready

HEADS = 16
"""Heads of a tile, at most."""
WARPS = 2112
"""Warps that sum the gradient of heads' norms, each over its share of the rows; fixed, so that its bits are too."""


@triton.jit
def _load(at, half: tl.constexpr, mask):
    """Both halves of heads, in float32."""
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store(at, first, second, half: tl.constexpr, mask):
    tl.store(at, first.to(at.dtype.element_ty), mask=mask)
    tl.store(at + half, second.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _kinds(head, HQ: tl.constexpr, HKV: tl.constexpr):
    """Which heads are queries, keys and values."""
    is_q = head < HQ
    is_k = (head >= HQ) & (head < HQ + HKV)
    is_v = (head >= HQ + HKV) & (head < HQ + 2 * HKV)
    return is_q, is_k, is_v


@triton.jit
def _normed(first, second, eps, D: tl.constexpr):
    """Heads over their root mean square, and what they were multiplied by."""
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) * (1.0 / D) + eps)[:, None]
    return first * scale, second * scale, scale


@triton.jit
def _weights(Q_NORM, K_NORM, pair, is_q, half: tl.constexpr, within):
    """The norms' weights, each where its heads are."""
    qa, qb = _load(Q_NORM + pair, half, within)
    ka, kb = _load(K_NORM + pair, half, within)
    return tl.where(is_q, qa, ka), tl.where(is_q, qb, kb)


@triton.jit
def _sum(part, chosen):
    """The sum over some of the heads."""
    return tl.sum(tl.where(chosen, part, 0.0), axis=0)


@triton.jit
def _rotate(
    FUSED, COS, SIN, POSITIONS, Q_NORM, K_NORM, Q, K, V, TABLE, SLOTS, eps, table_stride,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    NORM: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_PLACE: tl.constexpr,
    V_PAGE: tl.constexpr, V_HEAD: tl.constexpr, V_PLACE: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = D // 2
    program = tl.program_id(0)
    row = (program // TILES).to(tl.int64)
    head = ((program % TILES) * TILE + tl.arange(0, TILE))[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    within = pair < half
    is_q, is_k, is_v = _kinds(head, HQ, HKV)
    position = tl.load(POSITIONS + row).to(tl.int64)
    if PAGED:
        slot = tl.load(SLOTS + row).to(tl.int64)
        position = tl.where(slot >= 0, position, 0)
        inside = (is_q | is_k | is_v) & within
    else:
        inside = (is_q | is_k) & within

    here = FUSED + row * ((HQ + 2 * HKV) * D) + head * D + pair
    first, second = _load(here, half, inside)
    a = first
    b = second
    if NORM:
        na, nb, _ = _normed(first, second, eps, D)
        wa, wb = _weights(Q_NORM, K_NORM, pair, is_q, half, within)
        a = na * wa
        b = nb * wb
    cos = tl.load(COS + position * half + pair, mask=within, other=0.0)
    sin = tl.load(SIN + position * half + pair, mask=within, other=0.0)
    ya = a * cos - b * sin
    yb = b * cos + a * sin

    _store(Q + row * (HQ * D) + head * D + pair, ya, yb, half, is_q & within)
    if PAGED:
        used = slot >= 0
        page = tl.load(TABLE + slot * table_stride + position // PAGE, mask=used, other=0).to(tl.int64)
        offset = position % PAGE
        to_k = K + page * K_PAGE + offset * K_PLACE + (head - HQ) * K_HEAD + pair
        _store(to_k, ya, yb, half, is_k & within & used)
        to_v = V + page * V_PAGE + offset * V_PLACE + (head - HQ - HKV) * V_HEAD + pair
        _store(to_v, first, second, half, is_v & within & used)
    else:
        _store(K + row * (HKV * D) + (head - HQ) * D + pair, ya, yb, half, is_k & within)


@triton.jit(do_not_specialize=["T"])
def _rotate_backward(
    GQ, GK, GV, FUSED, COS, SIN, POSITIONS, Q_NORM, K_NORM, G, PARTS, T, eps,
    q_row, q_head, k_row, k_head, v_row, v_head,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    NORM: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    """Each program takes one tile of heads through its share of the rows and sums what goes to the norms' weights."""
    half: tl.constexpr = D // 2
    program = tl.program_id(0) // TILES
    programs = tl.num_programs(0) // TILES
    head = ((tl.program_id(0) % TILES) * TILE + tl.arange(0, TILE))[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    within = pair < half
    is_q, is_k, is_v = _kinds(head, HQ, HKV)
    part_a = tl.zeros([TILE, PAIRS], dtype=tl.float32)
    part_b = tl.zeros([TILE, PAIRS], dtype=tl.float32)
    start = program.to(tl.int64)
    for turn in range(0, tl.cdiv(T - program, programs)):
        row = start + turn * programs
        ga = tl.zeros([TILE, PAIRS], dtype=tl.float32)
        gb = tl.zeros([TILE, PAIRS], dtype=tl.float32)
        if HAS_Q:
            gqa, gqb = _load(GQ + row * q_row + head * q_head + pair, half, is_q & within)
            ga += gqa
            gb += gqb
        if HAS_K:
            gka, gkb = _load(GK + row * k_row + (head - HQ) * k_head + pair, half, is_k & within)
            ga += gka
            gb += gkb
        position = tl.load(POSITIONS + row).to(tl.int64)
        cos = tl.load(COS + position * half + pair, mask=within, other=0.0)
        sin = tl.load(SIN + position * half + pair, mask=within, other=0.0)
        a = ga * cos + gb * sin
        b = gb * cos - ga * sin
        here = row * ((HQ + 2 * HKV) * D) + head * D + pair
        if NORM:
            first, second = _load(FUSED + here, half, (is_q | is_k) & within)
            na, nb, scale = _normed(first, second, eps, D)
            part_a += a * na
            part_b += b * nb
            wa, wb = _weights(Q_NORM, K_NORM, pair, is_q, half, within)
            a = a * wa
            b = b * wb
            share = (tl.sum(a * na + b * nb, axis=1) * (1.0 / D))[:, None]
            a = (a - na * share) * scale
            b = (b - nb * share) * scale
        if HAS_V:
            va, vb = _load(GV + row * v_row + (head - HQ - HKV) * v_head + pair, half, is_v & within)
            a = tl.where(is_v, va, a)
            b = tl.where(is_v, vb, b)
        _store(G + here, a, b, half, (is_q | is_k | is_v) & within)
    if NORM:
        column = tl.arange(0, PAIRS)
        to = PARTS + tl.program_id(0).to(tl.int64) * (2 * D) + column
        _store(to, _sum(part_a, is_q), _sum(part_b, is_q), half, column < half)
        _store(to + D, _sum(part_a, is_k), _sum(part_b, is_k), half, column < half)


_launch_rotate, _launch_rotate_backward = Launcher(_rotate), Launcher(_rotate_backward)


@cache
def _tiles(num_heads, num_kv_heads, head_dim):
    """(pairs, heads of a tile, tiles of a row, warps), the same for every kernel of this file."""
    heads = num_heads + 2 * num_kv_heads
    pairs = triton.next_power_of_2(head_dim // 2)
    tile = min(HEADS, triton.next_power_of_2(heads))
    return pairs, tile, triton.cdiv(heads, tile), min(max(tile * pairs // 512, 1), 8)


def rotate(fused: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """The Triton kernel of `rows.rotate`, with the same arguments and results."""
    if not torch.is_grad_enabled():
        return turned(ready(fused), rotation)
    return _Rotate.apply(fused, rotation.q_norm, rotation.k_norm, rotation)


def rotate_into_pages(
    fused: Tensor, rotation: Rotation, keys: Tensor, values: Tensor, table: Tensor, slots: Tensor
) -> Tensor:
    """The Triton kernel of `rows.rotate_into_pages`, with the same arguments and results."""
    if keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError("a head's numbers lie beside each other in a page")
    pages = (keys, values, table.contiguous(), slots.contiguous())
    return _launch(ready(fused.detach()), rotation, keys, values, pages)


def _launch(fused, rotation, keys, values, pages):
    """The queries; keys go to rows of their own or, with values, into pages (keys, values, table, slots)."""
    rows = fused.shape[0]
    q = fused.new_empty((rows, rotation.num_heads, rotation.head_dim))
    heads = (rotation.num_heads, rotation.num_kv_heads, rotation.head_dim)
    pairs, tile, tiles, warps = _tiles(*heads)
    normed, paged = rotation.q_norm is not None, pages is not None
    table, slots = pages[2:] if paged else (rotation.positions, rotation.positions)
    norms = (ready(rotation.q_norm), ready(rotation.k_norm)) if normed else (fused, fused)
    strides = (*keys.stride()[:3], *values.stride()[:3]) if paged else (0, 0, 0, 0, 0, 0)
    if rows:
        _launch_rotate(
            rows * tiles,
            (
                fused, ready(rotation.cos), ready(rotation.sin), rotation.positions.contiguous(), *norms,
                q, keys, values, table, slots,
            ),
            (rotation.eps, table.stride(0)),
            (*heads, pairs, tile, tiles, normed, paged, keys.shape[2] if paged else 1, *strides),
            num_warps=warps,
        )  # fmt: skip
    return q


def turned(fused: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """`rotate` without a gradient, of a tensor that is `ready`; the values are a view of it."""
    rows = fused.shape[0]
    k = fused.new_empty((rows, rotation.num_kv_heads, rotation.head_dim))
    q = _launch(fused, rotation, k, k, None)
    heads = fused.view(rows, rotation.num_heads + 2 * rotation.num_kv_heads, rotation.head_dim)
    return q, k, heads[:, rotation.num_heads + rotation.num_kv_heads :]


def head_parts(layers: int, rows: int, rotation: Rotation) -> Tensor:
    """Room [N, P, 2 D] for what programs sum of the gradients of several layers' norms of queries and of keys."""
    _, _, tiles, warps = _tiles(rotation.num_heads, rotation.num_kv_heads, rotation.head_dim)
    programs = min(rows, max(WARPS // (tiles * _more(warps)), 1))
    shape = (layers, programs * tiles, 2 * rotation.head_dim)
    return torch.empty(shape, dtype=torch.float32, device=rotation.cos.device)


def _more(warps):
    """A gradient takes more registers."""
    return min(2 * warps, 8)


def turned_gradient(
    fused: Tensor | None,
    rotation: Rotation,
    gq: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    parts: Tensor | None,
    *,
    into: Tensor | None = None,
) -> Tensor:
    """The gradient of `fused`, which is needed where heads are normed only; one of the three must be there.

    Where heads are normed `parts` [P, 2 D] takes the gradients of both norms, as sums of P programs. `into` is room for
    the answer and not what is read.
    """
    normed = rotation.q_norm is not None
    template = next(g for g in (gq, gk, gv) if g is not None)
    gradients = [g if g is None or g.stride(2) == 1 else g.contiguous() for g in (gq, gk, gv)]
    strides = [stride for g in gradients for stride in ((0, 0) if g is None else g.stride()[:2])]
    heads = (rotation.num_heads, rotation.num_kv_heads, rotation.head_dim)
    pairs, tile, tiles, warps = _tiles(*heads)
    rows, dim = len(template), rotation.head_dim
    to_fused = template.new_empty((rows, (heads[0] + 2 * heads[1]) * dim)) if into is None else into
    programs = len(parts) if normed else rows * tiles
    if programs:
        _launch_rotate_backward(
            programs,
            (
                *(template if g is None else g for g in gradients), fused if normed else template,
                ready(rotation.cos), ready(rotation.sin), rotation.positions.contiguous(),
                ready(rotation.q_norm) if normed else template, ready(rotation.k_norm) if normed else template,
                to_fused, parts if normed else template,
            ),
            (rows, rotation.eps, *strides),
            (*heads, pairs, tile, tiles, normed, *(g is not None for g in gradients)),
            num_warps=_more(warps),
        )  # fmt: skip
    return to_fused


class _Rotate(torch.autograd.Function):
    """The rotation; its input is kept only where heads are normed."""

    @staticmethod
    def forward(ctx, fused, q_norm, k_norm, rotation):
        fused = ready(fused)
        ctx.set_materialize_grads(False)
        ctx.rotation = rotation
        if q_norm is not None:
            ctx.save_for_backward(fused)
        return turned(fused, rotation)

    @staticmethod
    @once_differentiable
    def backward(ctx, gq, gk, gv):
        if gq is None and gk is None and gv is None:
            return None, None, None, None
        saved = ctx.saved_tensors  # once: a layer that is computed again gives each away only once
        if not saved:
            return turned_gradient(None, ctx.rotation, gq, gk, gv, None), None, None, None
        parts = head_parts(1, len(saved[0]), ctx.rotation)
        to_fused = turned_gradient(saved[0], ctx.rotation, gq, gk, gv, parts[0])
        to_q, to_k = column_sums(parts, ctx.rotation.q_norm.dtype)[0].split(ctx.rotation.head_dim)
        return to_fused, to_q, to_k, None

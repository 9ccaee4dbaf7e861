"""Attention over a cache of pages and writing into it, in Triton: one kernel for decoding and for prefill.

A program computes one tile: the queries of a block that share a key head, each times the query heads of its group, as
ROWS rows. It walks over the keys in blocks counted from position 0, and a block of which a query sees nothing leaves
that query's sums as they were; the rows of a tile never meet. A query's bits therefore depend on the compiled kernel,
the query and its keys alone, and the kernel is the same for every block size that fits ROWS = SMALL_TILE.
"""

from math import log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engines.kernels.paged_attention import KEY_BLOCK, PAGE, SMALL_TILE, QueryBlocks

LOG2_E = log2(2.718281828459045)
LARGE_TILE = 64
"""Rows of a tile where a block has many queries."""


@triton.jit
def _bent(scores, cap, SOFTCAP: tl.constexpr):
    """Scores in powers of two; with a cap they come as twice the argument of its tanh."""
    if SOFTCAP:
        scores = cap - 2.0 * cap / (tl.exp(scores) + 1.0)
    return scores


@triton.jit
def _seen(where, own, window, WINDOW: tl.constexpr):
    """Which keys a query at `own` sees."""
    mask = where <= own
    if WINDOW:
        mask = mask & (where > own - window)
    return mask


@triton.jit
def _block_at(block, COUNT, SLOT, PLACE, FIRST):
    """Four loads that wait together: a branch between them would make a short sequence wait twice."""
    slot = tl.load(SLOT + block).to(tl.int64)
    return tl.load(COUNT + block), slot, tl.load(PLACE + block), tl.load(FIRST + block)


@triton.jit
def _at_first(sink_at, mine, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The greatest score and the sum of weights before the first key: the sink's own, or none."""
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sink_at, mask=mine, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(mine, sink, -1e30)
        total = tl.where(mine, 1.0, 0.0)
    return top, total


@triton.jit
def _part(block, head, tile, ROWS: tl.constexpr):
    """The first row of a program's sums among those of all programs."""
    return ((block.to(tl.int64) * tl.num_programs(1) + head) * tl.num_programs(2) + tile) * ROWS


# fmt: off
@triton.jit(
    do_not_specialize=("table_row",),  # sampler and learner have tables of other widths and want the same kernel
    do_not_specialize_on_alignment=("TABLE", "FIRST", "COUNT", "SLOT", "PLACE", "SINKS"),
)
def _attend(
    Q, K, V, OUT, TABLE, FIRST, COUNT, SLOT, PLACE, SINKS, TOPS, TOTALS, scale, cap, window,
    q_token, q_head, k_page, k_head, k_row, v_page, v_head, v_row, table_row, out_token,
    G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    # fmt: on
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2) % SPLITS
    TILE: tl.constexpr = ROWS // G
    begin = tl.program_id(2) // SPLITS * TILE
    count, slot, position, first = _block_at(block, COUNT, SLOT, PLACE, FIRST)
    if begin >= count:
        return
    row, d, dv, s = tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, BLOCK)
    query, q_of_head = begin + row // G, head * G + row % G
    inside = (row < TILE * G) & (query < count)
    own, token = position + query, (first + query).to(tl.int64)
    q_at = Q + token[:, None] * q_token + q_of_head[:, None] * q_head + d[None, :]
    q = tl.load(q_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)

    top, total = _at_first(SINKS + q_of_head, inside & (split == 0), ROWS, HAS_SINKS)
    mixed = tl.zeros([ROWS, DVP], tl.float32)
    end = position + tl.minimum(count, begin + TILE)
    low = tl.maximum(position + begin - window + 1, 0) if WINDOW else 0
    start_at, stop = low // BLOCK * BLOCK, end
    if SPLITS > 1:
        share = ((end - start_at + BLOCK - 1) // BLOCK + SPLITS - 1) // SPLITS * BLOCK
        start_at = start_at + split * share
        stop = tl.minimum(end, start_at + share)
    # The pages of a block are read one block before their keys, so that the compiler can issue the latter ahead.
    page_at = TABLE + slot * table_row + start_at // PAGE
    page0 = tl.load(page_at, mask=start_at < end, other=0)
    page1 = tl.load(page_at + 1, mask=start_at + PAGE < end, other=0)
    for start in range(start_at, stop, BLOCK):
        where, page = start + s, tl.where(s < PAGE, page0, page1).to(tl.int64)
        page_at += BLOCK // PAGE
        page0 = tl.load(page_at, mask=start + BLOCK < end, other=0)
        page1 = tl.load(page_at + 1, mask=start + BLOCK + PAGE < end, other=0)
        live = (where < end) & (where >= low)
        k_at = K + (page * k_page + s % PAGE * k_row + head * k_head)[:, None] + d[None, :]
        v_at = V + (page * v_page + s % PAGE * v_row + head * v_head)[:, None] + dv[None, :]
        k = tl.load(k_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(v_at, mask=live[:, None] & (dv < DV)[None, :], other=0.0)
        scores = _bent(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, cap, SOFTCAP)
        scores = tl.where(_seen(where[None, :], own[:, None], window, WINDOW), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights, decay = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        total = total * decay + tl.sum(weights, 1)
        mixed = mixed * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    if SPLITS == 1:
        out_at = OUT + token[:, None] * out_token + q_of_head[:, None] * DV + dv[None, :]
        out = (mixed / total[:, None]).to(OUT.dtype.element_ty)
        tl.store(out_at, out, mask=inside[:, None] & (dv < DV)[None, :])
    else:
        part = _part(block, head, tl.program_id(2), ROWS) + row
        tl.store(OUT + part[:, None] * DVP + dv[None, :], mixed)
        tl.store(TOPS + part, top)
        tl.store(TOTALS + part, total)


# fmt: off
@triton.jit(do_not_specialize_on_alignment=("FIRST", "COUNT"))
def _combine(
    OUT, FIRST, COUNT, PARTS, TOPS, TOTALS, out_token,
    G: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SPLITS: tl.constexpr,
):
    # fmt: on
    block, head = tl.program_id(0), tl.program_id(1)
    TILE: tl.constexpr = ROWS // G
    begin = tl.program_id(2) * TILE
    count = tl.load(COUNT + block)
    if begin >= count:
        return
    row, dv = tl.arange(0, ROWS), tl.arange(0, DVP)
    query = begin + row // G
    inside = (row < TILE * G) & (query < count)
    top, total = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DVP], tl.float32)
    first_part = _part(block, head, tl.program_id(2), ROWS * SPLITS)
    for split in range(SPLITS):
        part = first_part + split * ROWS + row
        part_top = tl.load(TOPS + part)
        higher = tl.maximum(top, part_top)
        decay, added = tl.exp2(top - higher), tl.exp2(part_top - higher)
        total = total * decay + tl.load(TOTALS + part) * added
        mixed = mixed * decay[:, None] + tl.load(PARTS + part[:, None] * DVP + dv[None, :]) * added[:, None]
        top = higher
    token = (tl.load(FIRST + block) + query).to(tl.int64)
    out_at = OUT + token[:, None] * out_token + (head * G + row % G)[:, None] * DV + dv[None, :]
    out = (mixed / total[:, None]).to(OUT.dtype.element_ty)
    tl.store(out_at, out, mask=inside[:, None] & (dv < DV)[None, :])


# fmt: off
@triton.jit(do_not_specialize=("table_row",), do_not_specialize_on_alignment=("TABLE", "SLOTS", "PLACES"))
def _write(
    KEYS, VALUES, K, V, TABLE, SLOTS, PLACES, table_row,
    from_k_token, from_k_head, from_v_token, from_v_head, k_page, k_head, k_row, v_page, v_head, v_row,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
):
    # fmt: on
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(SLOTS + token)
    if slot < 0:
        return
    position = tl.load(PLACES + token)
    page = tl.load(TABLE + slot.to(tl.int64) * table_row + position // PAGE).to(tl.int64)
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    k = tl.load(K + token * from_k_token + head * from_k_head + d, mask=d < D, other=0.0)
    v = tl.load(V + token * from_v_token + head * from_v_head + dv, mask=dv < DV, other=0.0)
    k_at = KEYS + page * k_page + head * k_head + position % PAGE * k_row + d
    v_at = VALUES + page * v_page + head * v_head + position % PAGE * v_row + dv
    tl.store(k_at, k.to(KEYS.dtype.element_ty), mask=d < D)
    tl.store(v_at, v.to(VALUES.dtype.element_ty), mask=dv < DV)


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _strides(cache: Tensor) -> tuple[int, int, int]:
    """Of a page, a head and a token; the numbers of a head lie together."""
    return cache.stride(0), cache.stride(1), cache.stride(2)


def _together(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous, its strides are {tensor.stride()}")


def write_pages(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, table: Tensor, slots: Tensor, places: Tensor
) -> None:
    """See `paged_attention.write_pages`."""
    _together(keys=keys, values=values, k=k, v=v, table=table, slots=slots, places=places)
    dim, value_dim = k.shape[2], v.shape[2]
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1), *_strides(keys), *_strides(values))
    sizes = (dim, _padded(dim), value_dim, _padded(value_dim), PAGE)
    if len(k):
        _write[len(k), k.shape[1]](
            keys, values, k, v, table, slots, places, table.stride(0), *strides, *sizes, num_warps=1
        )


def tile_rows(groups: int, size: int, dim: int, exact: bool) -> int:
    """Rows of a tile; where a block has more queries than fit, several programs share it."""
    least = max(SMALL_TILE, triton.next_power_of_2(groups))
    most = least if exact else LARGE_TILE if dim <= 128 else LARGE_TILE // 2
    return max(least, min(most, triton.next_power_of_2(groups * size)))


def launch_shape(rows: int, block_bytes: int, exact: bool) -> tuple[int, int]:
    """Warps and stages for a tile and a block of keys and values of so many bytes.

    Exact products take no tensor cores, and more registers: a larger tile or fewer warps would spill them.
    """
    small = block_bytes <= 1 << 15
    if exact:
        return (4, 2) if small else (8, 1)
    if rows == SMALL_TILE:
        return (2 if block_bytes <= 1 << 14 else 4), (3 if small else 2)
    return (4, 3) if small else (8, 2)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    blocks: QueryBlocks,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    splits: int,
) -> Tensor:
    """See `paged_attention.paged_attention`."""
    _together(q=q, keys=keys, values=values, table=table)
    (tokens, heads, dim), shared, value_dim = q.shape, keys.shape[1], values.shape[3]
    dp, dvp, groups = _padded(dim), _padded(value_dim), heads // shared
    exact = q.dtype == torch.float32
    rows = tile_rows(groups, blocks.size, max(dp, dvp), exact)
    grid = (len(blocks.first), shared, triton.cdiv(blocks.size, rows // groups))
    out = torch.empty(tokens, heads * value_dim, dtype=q.dtype, device=q.device)
    if not grid[0]:
        return out
    mixed = tops = totals = out
    if splits > 1:
        parts = grid[0] * grid[1] * grid[2] * splits * rows
        mixed = torch.empty(parts * dvp, dtype=torch.float32, device=q.device)
        tops, totals = torch.empty(2, parts, dtype=torch.float32, device=q.device)
    bent = softcap is not None
    by_kernel = (2 * scale / softcap, softcap * LOG2_E) if bent else (scale * LOG2_E, 1.0)
    warps, stages = launch_shape(rows, KEY_BLOCK * (dp + dvp) * q.element_size(), exact)
    _attend[grid[0], grid[1], grid[2] * splits](
        q, keys, values, mixed, table, blocks.first, blocks.count, blocks.slot, blocks.place,
        q if sinks is None else sinks, tops, totals, *by_kernel, 0 if window is None else window,
        q.stride(0), q.stride(1), *_strides(keys), *_strides(values), table.stride(0), out.stride(0),
        groups, rows, dim, dp, value_dim, dvp, KEY_BLOCK, PAGE, splits, window is not None, bent, sinks is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        sizes = (groups, rows, value_dim, dvp, splits)
        _combine[grid](out, blocks.first, blocks.count, mixed, tops, totals, out.stride(0), *sizes, num_warps=4)
    return out

"""Attention over a cache of pages, for one query of many sequences as for many queries of one.

Legend: T query rows, NB blocks of queries, Hq and Hkv heads, D and Dv head dimensions of keys and values. A layer's
cache is keys [pages, Hkv, PAGE, D] and values [pages, Hkv, PAGE, Dv]; row `slot` of `table [slots, max_pages]` names
the pages of a sequence in order, so that position p lies in page `table[slot, p // PAGE]` at `p % PAGE`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.engines.kernels.dispatch import use_triton

PAGE = 32
"""Tokens of a page."""
KEY_BLOCK = 64
"""Keys that are mixed at a time, counted from position 0 whoever asks: every query rounds at the same places."""
SMALL_TILE = 16
"""Rows of the tile that holds the query heads of one key head; the least that tensor cores take."""
REFERENCE_BLOCKS = 512
"""Query blocks that the reference computes at a time: it copies their keys."""


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """Which query rows belong to which sequence: NB runs of at most `size` neighbouring rows, int32 tensors all.

    Decoding two sequences at positions 7 and 30: `QueryBlocks(first=[0, 1], count=[1, 1], slot=[4, 2], place=[7, 30],
    size=1)`.
    """

    first: Tensor
    """[NB] the row of the block's first query."""
    count: Tensor
    """[NB] how many rows, 0 to `size`; with 0 nothing is done and the block's other numbers are not looked at."""
    slot: Tensor
    """[NB] the row of the page table."""
    place: Tensor
    """[NB] the position of the first query; the others follow it."""
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a block holds at least one query, found size {self.size}")


def invariant_size(num_heads: int, num_kv_heads: int) -> int:
    """Most queries of a block that are computed by the very code of a single one, so that their bits are the same."""
    return max(1, SMALL_TILE // (num_heads // num_kv_heads))


def write_pages(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, table: Tensor, slots: Tensor, places: Tensor
) -> None:
    """Put k [T, Hkv, D] and v [T, Hkv, Dv] at positions `places` of the sequences in `slots`; slot -1 is skipped."""
    if use_triton(k):
        from turnwise.engines.kernels.triton import attention as triton_attention

        triton_attention.write_pages(keys, values, k, v, table, slots, places)
        return
    used = slots >= 0
    slots, places = slots[used].long(), places[used].long()
    pages = table[slots, places // PAGE].long()
    keys[pages, :, places % PAGE] = k[used]
    values[pages, :, places % PAGE] = v[used]


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    blocks: QueryBlocks,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int = 1,
) -> Tensor:
    """Queries q [T, Hq, D] of `blocks` mixed over positions 0 to their own, the last `window` of them -> [T, Hq * Dv].

    Rows of no block come out undefined. In blocks of at most `invariant_size` a query's bits depend on that query and
    its keys alone: not on the other blocks, its row, or what else lies in the cache. With `splits` of more than one
    that many programs share the keys of a query and round elsewhere; a GPU that few queries leave idle wants it.
    """
    if q.shape[1] % keys.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not share {keys.shape[1]} key heads evenly")
    if use_triton(q):
        from turnwise.engines.kernels.triton import attention as triton_attention

        mixed: Tensor = triton_attention.paged_attention(
            q, keys, values, table, blocks, scale=scale, window=window, softcap=softcap, sinks=sinks, splits=splits
        )
        return mixed
    out = q.new_zeros(len(q), q.shape[1], values.shape[-1])
    live = torch.nonzero(blocks.count > 0)[:, 0]
    for part in torch.split(live, REFERENCE_BLOCKS) if len(live) else ():
        _reference(out, q, keys, values, table, _Tiles.of(blocks, part), _Layer(scale, window, softcap, sinks))
    return out.flatten(1)


@dataclass(frozen=True, slots=True)
class _Layer:
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Some query blocks as a rectangle [n, size]."""

    rows: Tensor
    inside: Tensor
    own: Tensor
    """Positions; of padding that of the block's last query."""
    slot: Tensor

    @staticmethod
    def of(blocks: QueryBlocks, part: Tensor) -> "_Tiles":
        first, count, slot, position = (x[part].long() for x in (blocks.first, blocks.count, blocks.slot, blocks.place))
        column = torch.arange(blocks.size, device=first.device)
        step = torch.minimum(column, count.unsqueeze(1) - 1)
        return _Tiles(first.unsqueeze(1) + step, column < count.unsqueeze(1), position.unsqueeze(1) + step, slot)


def _reference(
    out: Tensor, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, tiles: _Tiles, layer: _Layer
) -> None:
    """Mix the tiles' queries into `out [T, Hq, Dv]` in float32, over the same blocks of keys as the Triton kernel."""
    count, size = tiles.rows.shape
    shared, dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    groups = q.shape[1] // shared
    used = size * groups
    padded = -(-used // SMALL_TILE) * SMALL_TILE  # few rows take other paths in a BLAS and round differently
    queries = q.new_zeros(count, shared, padded, dim, dtype=torch.float32)
    by_group = q[tiles.rows].view(count, size, shared, groups, dim)
    queries[:, :, :used] = by_group.transpose(1, 2).reshape(count, shared, used, dim).float()
    own = tiles.own[:, -1:].repeat(1, padded)
    own[:, :used] = tiles.own.repeat_interleave(groups, dim=1)
    own = own.view(count, 1, padded, 1)

    top = queries.new_full((count, shared, padded, 1), -1e30)
    total = torch.zeros_like(top)
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(1, shared, 1, groups).expand(count, shared, size, groups)
        top[:, :, :used] = sinks.reshape(count, shared, used, 1)
        total[:, :, :used] = 1.0
    mixed = queries.new_zeros(count, shared, padded, value_dim)
    low = 0 if layer.window is None else max(int(own.min()) - layer.window + 1, 0)
    for start in range(low // KEY_BLOCK * KEY_BLOCK, int(own.max()) + 1, KEY_BLOCK):
        positions = torch.arange(start, start + KEY_BLOCK, device=q.device)
        mask = positions <= own
        if layer.window is not None:
            mask &= positions > own - layer.window
        live = mask.any(dim=2)[:, 0]
        k, v = (_block(cache, table, tiles.slot, positions, live) for cache in (keys, values))
        scores = queries @ k.transpose(2, 3) * layer.scale
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        higher = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - higher)
        decay = torch.exp(top - higher)
        total = total * decay + weights.sum(dim=-1, keepdim=True)
        mixed = mixed * decay + weights @ v
        top = higher
    result = (mixed / total)[:, :, :used].view(count, shared, size, groups, value_dim).transpose(1, 2)
    out[tiles.rows[tiles.inside]] = result[tiles.inside].flatten(1, 2).to(out.dtype)


def _block(cache: Tensor, table: Tensor, slot: Tensor, positions: Tensor, live: Tensor) -> Tensor:
    """These positions as [n, Hkv, KEY_BLOCK, D] in float32; zeros where not `live [n, KEY_BLOCK]`, garbage or not."""
    column = (positions // PAGE).clamp(max=table.shape[1] - 1)
    pages = table[slot.unsqueeze(1), column].long().masked_fill(~live, 0)
    rows = cache[pages, :, positions % PAGE].transpose(1, 2).float()
    return rows.masked_fill(~live[:, None, :, None], 0.0)

"""Attention that knows which tokens see which: packed sequences for training, exact ones that mirror the sampler.

Two families. `packed` is the fast one for gradients. `exact` and the sampler's `cached_prefill` and `cached_decode`
share one kernel, `_mix`, whose bits for a query depend on that query and its keys alone: not on the other sequences,
not on how many queries are computed together, not on the padding behind the keys. Which shapes of products that takes
is a `Regime`, and differs from one processor to another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from turnwise.engines.model.policy_model import Attend, Mixing

PADDING_ALLOWED = 1.15
"""A bucket holds at most this many times the tokens of its sequences; more buckets waste less and cost more calls."""
PANEL_ALLOWED = 1.5
"""The same for the chunks of prompts that are prefilled together."""
PANEL_SCORES = 1 << 16
"""Most scores per head of one panel: they are written and read several times and should stay in the L2 cache."""
KEY_PAD = 32
"""Keys are padded to whole vectors so that the sum in a softmax never meets a ragged tail."""


@dataclass(frozen=True, slots=True)
class Regime:
    """The shapes in which products are taken: `Regime(row_pad=16, query_rows=2, key_block=256)`.

    Within the right one a row's bits do not depend on its company. `threads.find_regime` proves which one is right.
    """

    row_pad: int
    """Rows of a weight product are padded to a multiple: few rows take other paths in a BLAS and round differently."""
    query_rows: int
    """The same for the query rows of each attention head; a single row is a matrix-vector product everywhere."""
    key_block: int
    """Values are summed in blocks of this many keys, a multiple of KEY_PAD: a BLAS splits longer sums at places that
    depend on the total."""


def positions(lengths: Sequence[int]) -> Tensor:
    """Positions of packed sequences: `positions([2, 3])` is 0 1 0 1 2."""
    counts, total = torch.tensor(lengths), sum(lengths)
    starts = counts.cumsum(0) - counts
    return torch.arange(total) - torch.repeat_interleave(starts, counts, output_size=total)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, for which the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def padded(count: int, multiple: int) -> int:
    """The next multiple: `padded(17, 16)` is 32."""
    return -(-count // multiple) * multiple


def pad_rows(x: Tensor, regime: Regime) -> Tensor:
    """Zeros behind the rows up to a whole multiple, so that every matrix product rounds alike."""
    spare = padded(len(x), regime.row_pad) - len(x)
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, spare)) if spare else x


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sequences of similar length as a rectangle: which packed rows fill it, and its shape."""

    rows: Tensor
    count: int
    width: int


def _buckets(lengths: Sequence[int]) -> tuple[list[_Bucket], Tensor]:
    """Rectangles over the packed rows, and where each packed row lies in their concatenation; both on the CPU."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    groups: list[list[int]] = []
    filled = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= PADDING_ALLOWED * (filled + lengths[index]):
            groups[-1].append(index)
            filled += lengths[index]
        else:
            groups.append([index])
            filled = lengths[index]
    buckets: list[_Bucket] = []
    home = torch.empty(starts[-1], dtype=torch.long)
    base = 0
    for group in groups:
        width = lengths[group[0]]
        column = torch.arange(width)
        # Padding repeats the last token of its sequence; causality keeps it out of sight of the real ones.
        rows = torch.cat([starts[i] + column.clamp(max=lengths[i] - 1) for i in group])
        for number, index in enumerate(group):
            home[starts[index] : starts[index + 1]] = base + number * width + column[: lengths[index]]
        buckets.append(_Bucket(rows, len(group), width))
        base += len(group) * width
    return buckets, home


def packed(lengths: Sequence[int], device: torch.device | None = None) -> Attend:
    """Causal attention within each of several concatenated sequences, on the CPU if not told; differentiable."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"sequence lengths must be positive, found {list(lengths)}")
    buckets, home = _buckets(lengths)
    whole = len(buckets) == 1 and buckets[0].count * buckets[0].width == len(home)
    if device is not None and not whole:  # nobody asks a whole rectangle which rows fill it
        buckets = [_Bucket(sent(bucket.rows, device), bucket.count, bucket.width) for bucket in buckets]
        home = sent(home, device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
        mixed: list[Tensor] = []
        for bucket in buckets:

            def rectangle(x: Tensor, bucket: _Bucket = bucket) -> Tensor:
                rows = x if whole else x.index_select(0, bucket.rows)
                return rows.view(bucket.count, bucket.width, *x.shape[1:]).transpose(1, 2)

            out = _mix_rectangle(rectangle(q), rectangle(k), rectangle(v), mixing)
            mixed.append(out.transpose(1, 2).reshape(bucket.count * bucket.width, -1))
        return mixed[0] if whole else torch.cat(mixed).index_select(0, home)

    return attend


def _mix_rectangle(q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
    """Whole causal sequences [n, H, T, D] of one length; torch's own kernels wherever they can express the layer."""
    grouped, length = q.shape[1] != k.shape[1], q.shape[2]
    mask = None
    if mixing.window is not None and mixing.window < length:
        position = torch.arange(length, device=q.device)
        back = position.unsqueeze(1) - position
        mask = (back >= 0) & (back < mixing.window)
    if mixing.softcap is None and mixing.sinks is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=mixing.scale, enable_gqa=grouped
        )
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * _scale(mixing, q.shape[-1])
    if mixing.softcap is not None:
        scores = torch.tanh(scores / mixing.softcap) * mixing.softcap
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if mixing.sinks is not None:
        sinks = mixing.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :length].to(v.dtype) @ v


def _scale(mixing: Mixing, head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if mixing.scale is None else mixing.scale


def _mix(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, regime: Regime, mixing: Mixing) -> Tensor:
    """The exact kernel, for n sequences of R queries each.

    q [n, Hkv, G, R, D], keys [n, Hkv, D, S], values [n, Hkv, S, Dv], additive mask [n or 1, 1, 1, R, S]; returns
    [n, Hkv, G, R, Dv].
    """
    count, shared, groups, queries, size = q.shape
    width, block = keys.shape[-1], regime.key_block
    used = groups * queries
    rows = (q * _scale(mixing, size)).reshape(count * shared, used, size)
    spare = padded(used, regime.query_rows) - used
    if spare:
        rows = functional.pad(rows, (0, 0, 0, spare))
    scores = torch.bmm(rows, keys.view(count * shared, size, width))
    if mixing.softcap is not None:
        scores = torch.tanh(scores / mixing.softcap) * mixing.softcap
    # In place is fine for autograd too: a product's gradient needs its factors, not itself.
    scores[:, :used].view(count, shared, groups, queries, width).add_(mask)
    if mixing.sinks is not None:
        scores = _with_sinks(scores, mixing.sinks, q)
    weights = torch.softmax(scores, dim=-1)
    values = values.view(count * shared, width, -1)
    mixed = torch.bmm(weights[:, :, : min(block, width)], values[:, :block])
    for start in range(block, width, block):
        stop = min(start + block, width)
        mixed = mixed + torch.bmm(weights[:, :, start:stop], values[:, start:stop])
    return mixed[:, :used].view(count, shared, groups, queries, -1)


def _with_sinks(scores: Tensor, sinks: Tensor, q: Tensor) -> Tensor:
    """The scores and behind them each head's sink, in a whole vector of its own so that no tail is ragged."""
    count, shared, groups, queries, _ = q.shape
    tail = scores.new_full((*scores.shape[:2], KEY_PAD), -torch.inf)
    by_row = sinks.to(scores.dtype).view(1, shared, groups, 1).expand(count, shared, groups, queries)
    tail[:, : groups * queries, 0] = by_row.reshape(count * shared, -1)
    return torch.cat((scores, tail), dim=-1)


def _mask(places: Tensor, width: int, dtype: torch.dtype, window: int | None) -> Tensor:
    """[n, 1, 1, R, width] for queries at `places[n, R]`: each sees the keys up to its own, a window of them or all."""
    key, own = torch.arange(width, device=places.device), places.unsqueeze(-1)
    hidden = key > own
    if window is not None:
        hidden |= key <= own - window
    zeros = torch.zeros(hidden.shape, dtype=dtype, device=places.device)
    return zeros.masked_fill_(hidden, -torch.inf).unsqueeze(1).unsqueeze(1)


class _Masks:
    """The masks of one set of queries, one for each window that a layer asks for."""

    def __init__(self, places: Tensor, width: int, dtype: torch.dtype) -> None:
        self._places, self._width, self._dtype = places, width, dtype
        self._made: dict[int | None, Tensor] = {}

    def of(self, mixing: Mixing) -> Tensor:
        """The mask of a layer; a window that hides nothing is none."""
        window = None if mixing.window is None or mixing.window >= self._width else mixing.window
        if window not in self._made:
            self._made[window] = _mask(self._places, self._width, self._dtype, window)
        return self._made[window]


def exact(lengths: Sequence[int], regime: Regime) -> Attend:
    """Whole sequences with the sampler's own kernel, so that a learner can reproduce its logprobs bit by bit.

    Rows beyond the sum of lengths are padding (see `Regime.row_pad`) and attend to nothing.
    """
    widths = [padded(length, KEY_PAD) for length in lengths]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
        shared, size, start = k.shape[1], k.shape[2], 0
        mixed: list[Tensor] = []
        for length, width in zip(lengths, widths, strict=True):
            end, spare = start + length, width - length
            keys = functional.pad(k[start:end].permute(1, 2, 0), (0, spare)).unsqueeze(0)
            values = functional.pad(v[start:end].transpose(0, 1), (0, 0, 0, spare)).unsqueeze(0)
            queries = q[start:end].view(1, length, shared, -1, size).permute(0, 2, 3, 1, 4)
            places = torch.arange(length, device=q.device).unsqueeze(0)
            mask = _mask(places, width, q.dtype, mixing.window)
            out = _mix(queries, keys, values, mask, regime, mixing)
            mixed.append(out.permute(0, 3, 1, 2, 4).reshape(length, -1))
            start = end
        mixed.append(q.new_zeros(len(q) - start, q.shape[1] * v.shape[2]))
        return torch.cat(mixed)

    return attend


class KeyValueStore(Protocol):
    """Where cached attention reads and writes."""

    layers: list[tuple[Tensor, Tensor]]
    """Of each layer the keys [rows, Hkv, D, capacity] and the values [rows, Hkv, capacity, Dv], all of one capacity."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of the sequence in `row`, the next ones its cache lacks."""

    row: int
    start: int
    end: int

    @property
    def length(self) -> int:
        """The number of tokens of the chunk."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Panel:
    """Chunks of similar length in neighbouring rows, computed as one rectangle of queries."""

    first: int
    count: int
    width: int
    rows: Tensor
    """Which query row fills each place of the rectangle."""
    masks: _Masks


def _panels(chunks: Sequence[Chunk], store: KeyValueStore) -> tuple[list[_Panel], Tensor]:
    """Rectangles over the chunks, and where each query row lies in their concatenation."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        group = [*groups[-1], chunk] if groups else [chunk]
        neighbour = len(group) > 1 and chunk.row == group[-2].row + 1
        area = len(group) * max(c.length for c in group) * max(c.end for c in group)
        # The scores of the whole rectangle against those that are needed, and against what a cache holds.
        if neighbour and area <= min(PANEL_ALLOWED * sum(c.length * c.end for c in group), PANEL_SCORES):
            groups[-1] = group
        else:
            groups.append([chunk])
    panels: list[_Panel] = []
    home: list[Tensor] = []
    dtype, device = store.layers[0][0].dtype, store.layers[0][0].device
    begin = base = 0
    for group in groups:
        queries = max(chunk.length for chunk in group)
        column = torch.arange(queries)
        rows, places = [], []
        for chunk in group:
            inside = column.clamp(max=chunk.length - 1)  # padding repeats the chunk's last query
            rows.append(begin + inside)
            places.append(chunk.start + inside)
            home.append(base + column[: chunk.length])
            begin, base = begin + chunk.length, base + queries
        width = padded(max(chunk.end for chunk in group), KEY_PAD)
        masks = _Masks(torch.stack(places).to(device), width, dtype)
        panels.append(_Panel(group[0].row, len(group), width, torch.cat(rows).to(device), masks))
    return panels, torch.cat(home).to(device)


def _nobody_attends(layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
    raise RuntimeError(f"attention layer {layer} of a model that has none")


def cached_prefill(store: KeyValueStore, chunks: Sequence[Chunk], regime: Regime) -> Attend:
    """Append the chunks' keys and values to their rows and let each chunk see all of its sequence so far."""
    if not store.layers:
        return _nobody_attends
    panels, home = _panels(chunks, store)
    total = len(home)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
        keys, values = store.layers[layer]
        begin = 0
        for chunk in chunks:
            stop = begin + chunk.length
            keys[chunk.row, :, :, chunk.start : chunk.end] = k[begin:stop].permute(1, 2, 0)
            values[chunk.row, :, chunk.start : chunk.end] = v[begin:stop].transpose(0, 1)
            begin = stop
        shared, size = k.shape[1], k.shape[2]
        mixed: list[Tensor] = []
        for panel in panels:
            sequences = slice(panel.first, panel.first + panel.count)
            queries = q.index_select(0, panel.rows).view(panel.count, -1, shared, q.shape[1] // shared, size)
            out = _mix(
                queries.permute(0, 2, 3, 1, 4),
                keys[sequences, :, :, : panel.width],
                values[sequences, :, : panel.width],
                panel.masks.of(mixing),
                regime,
                mixing,
            )
            mixed.append(out.permute(0, 3, 1, 2, 4).reshape(len(panel.rows), -1))
        together = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return functional.pad(together.index_select(0, home), (0, 0, 0, len(q) - total))

    return attend


def cached_decode(store: KeyValueStore, places: Tensor, regime: Regime) -> Attend:
    """One new token for each of the first n rows, at position `places[n]`; further query rows are padding."""
    if not store.layers:
        return _nobody_attends
    count = len(places)
    width = padded(int(places.max()) + 1, KEY_PAD)
    first = store.layers[0][0]
    places = places.to(first.device)
    masks = _Masks(places.unsqueeze(1), width, first.dtype)
    addresses: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for keys, _ in store.layers:
        _, shared, size, capacity = keys.shape
        if (shared, size) not in addresses:
            # Flat addresses: keys lie with positions innermost, values with positions outside the head dimension.
            by_key, by_head = (
                (torch.arange(count * n, device=first.device).view(count, -1) * capacity + places.unsqueeze(1)).view(-1)
                for n in (shared * size, shared)
            )
            addresses[shared, size] = by_key, by_head

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing) -> Tensor:
        keys, values = store.layers[layer]
        shared, size, value_size = k.shape[1], k.shape[2], v.shape[2]
        by_key, by_head = addresses[shared, size]
        keys.view(-1).index_copy_(0, by_key, k[:count].reshape(-1))
        values.view(-1, value_size).index_copy_(0, by_head, v[:count].reshape(-1, value_size))
        mixed = _mix(
            q[:count].view(count, shared, -1, 1, size),
            keys[:count, :, :, :width],
            values[:count, :, :width],
            masks.of(mixing),
            regime,
            mixing,
        )
        return functional.pad(mixed.reshape(count, -1), (0, 0, 0, len(q) - count))

    return attend

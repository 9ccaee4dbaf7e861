"""Attention that knows which tokens see which: packed sequences for training, exact ones that mirror the sampler.

Two families. `packed` is the fast one for gradients. `exact` and the sampler's `cached_prefill` and `cached_decode`
share one kernel, `_mix`, whose bits for a query depend on that query and its keys alone: not on the other sequences,
not on how many queries are computed together, not on the padding behind the keys.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from turnwise.engines.decoder import Attend

PADDING_ALLOWED = 1.15
"""A bucket holds at most this many times the tokens of its sequences; more buckets waste less and cost more calls."""
ROW_PAD = 16
"""Matrix products of fewer rows take other paths in the BLAS and round differently."""
KEY_PAD = 64
"""Keys are padded to whole vectors so that the sum in a softmax never meets a ragged tail."""
KEY_BLOCK = 256
"""Values are summed in blocks of this many keys: a BLAS splits longer sums at places that depend on the total."""


def positions(lengths: Sequence[int]) -> Tensor:
    """Positions of packed sequences: `positions([2, 3])` is 0 1 0 1 2."""
    return torch.cat([torch.arange(length) for length in lengths])


def padded(count: int, multiple: int) -> int:
    """The next multiple: `padded(17, 16)` is 32."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sequences of similar length as a rectangle: which packed rows fill it, and its shape."""

    rows: Tensor
    count: int
    width: int


def _buckets(lengths: Sequence[int]) -> tuple[list[_Bucket], Tensor]:
    """Rectangles over the packed rows, and where each packed row lies in their concatenation."""
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
        for place, index in enumerate(group):
            home[starts[index] : starts[index + 1]] = base + place * width + column[: lengths[index]]
        buckets.append(_Bucket(rows, len(group), width))
        base += len(group) * width
    return buckets, home


def packed(lengths: Sequence[int]) -> Attend:
    """Causal attention within each of several concatenated sequences; differentiable."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"sequence lengths must be positive, found {list(lengths)}")
    buckets, home = _buckets(lengths)
    whole = len(buckets) == 1 and buckets[0].count * buckets[0].width == len(home)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed: list[Tensor] = []
        for bucket in buckets:

            def rectangle(x: Tensor, bucket: _Bucket = bucket) -> Tensor:
                rows = x if whole else x.index_select(0, bucket.rows)
                return rows.view(bucket.count, bucket.width, *x.shape[1:]).transpose(1, 2)

            grouped = q.shape[1] != k.shape[1]
            out = functional.scaled_dot_product_attention(
                rectangle(q), rectangle(k), rectangle(v), is_causal=True, enable_gqa=grouped
            )
            mixed.append(out.transpose(1, 2).reshape(bucket.count * bucket.width, -1))
        return mixed[0] if whole else torch.cat(mixed).index_select(0, home)

    return attend


def _mix(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The exact kernel: q [N, R, D], keys [N, D, S], values [N, S, D], additive mask [N or 1, R or 1, S] -> [N, R, D].

    A single query row would be a matrix-vector product with its own rounding, so one row is computed as two.
    """
    rows = q.shape[1]
    if rows == 1:
        q = q.expand(-1, 2, -1)
    scores = torch.bmm(q * (1.0 / math.sqrt(q.shape[-1])), keys) + mask
    weights = torch.softmax(scores, dim=-1)
    mixed = torch.bmm(weights[:, :, :KEY_BLOCK], values[:, :KEY_BLOCK])
    for start in range(KEY_BLOCK, weights.shape[-1], KEY_BLOCK):
        stop = start + KEY_BLOCK
        mixed = mixed + torch.bmm(weights[:, :, start:stop], values[:, start:stop])
    return mixed[:, :rows]


def _causal_mask(start: int, count: int, width: int, groups: int, dtype: torch.dtype) -> Tensor:
    """[1, groups * count, width]: query i, at position start + i, sees keys up to its own."""
    visible = torch.arange(width) <= torch.arange(start, start + count).unsqueeze(1)
    return torch.zeros((count, width), dtype=dtype).masked_fill_(~visible, -torch.inf).repeat(groups, 1).unsqueeze(0)


def _mix_sequence(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """One sequence's queries [n, Hq, D] against its keys [Hkv, D, S] and values [Hkv, S, D] -> [n, Hq * D]."""
    count, heads, size = q.shape
    shared = keys.shape[0]
    rows = q.view(count, shared, heads // shared, size).permute(1, 2, 0, 3).reshape(shared, -1, size)
    mixed = _mix(rows, keys, values, mask)
    return mixed.view(shared, heads // shared, count, size).permute(2, 0, 1, 3).reshape(count, heads * size)


def exact(lengths: Sequence[int]) -> Attend:
    """Whole sequences with the sampler's own kernel, so that a learner can reproduce its logprobs bit by bit.

    Rows beyond the sum of lengths are padding (see `ROW_PAD`) and attend to nothing.
    """
    widths = [padded(length, KEY_PAD) for length in lengths]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups, start = q.shape[1] // k.shape[1], 0
        mixed: list[Tensor] = []
        for length, width in zip(lengths, widths, strict=True):
            end, spare = start + length, width - length
            keys = functional.pad(k[start:end].permute(1, 2, 0), (0, spare))
            values = functional.pad(v[start:end].transpose(0, 1), (0, 0, 0, spare))
            mask = _causal_mask(0, length, width, groups, q.dtype)
            mixed.append(_mix_sequence(q[start:end], keys, values, mask))
            start = end
        mixed.append(q.new_zeros(len(q) - start, q.shape[1] * q.shape[2]))
        return torch.cat(mixed)

    return attend


class KeyValueStore(Protocol):
    """Where cached attention reads and writes: keys [layers, rows, Hkv, D, capacity], values [..., capacity, D]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of the sequence in `row`, the next ones its cache lacks."""

    row: int
    start: int
    end: int


def cached_prefill(store: KeyValueStore, chunks: Sequence[Chunk]) -> Attend:
    """Append the chunks' keys and values to their rows and let each chunk see all of its sequence so far."""
    widths = [padded(chunk.end, KEY_PAD) for chunk in chunks]
    groups = 0
    masks: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal groups
        if not masks:
            groups = q.shape[1] // k.shape[1]
            masks.extend(
                _causal_mask(c.start, c.end - c.start, width, groups, q.dtype)
                for c, width in zip(chunks, widths, strict=True)
            )
        all_keys, all_values, begin = store.keys[layer], store.values[layer], 0
        out = q.new_zeros(len(q), q.shape[1] * q.shape[2])
        for chunk, width, mask in zip(chunks, widths, masks, strict=True):
            stop = begin + chunk.end - chunk.start
            keys, values = all_keys[chunk.row], all_values[chunk.row]
            keys[:, :, chunk.start : chunk.end] = k[begin:stop].permute(1, 2, 0)
            values[:, chunk.start : chunk.end] = v[begin:stop].transpose(0, 1)
            out[begin:stop] = _mix_sequence(q[begin:stop], keys[:, :, :width], values[:, :width], mask)
            begin = stop
        return out

    return attend


def cached_decode(store: KeyValueStore, places: Tensor) -> Attend:
    """One new token for each of the first n rows, at position `places[n]`; further query rows are padding."""
    count = len(places)
    width = padded(int(places.max()) + 1, KEY_PAD)
    _, rows, shared, size, capacity = store.keys.shape
    hidden = torch.arange(width) > places.repeat_interleave(shared).unsqueeze(1)
    mask = torch.zeros(hidden.shape, dtype=store.keys.dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)
    # Flat indices: keys lie with positions innermost, values with positions outside the head dimension.
    key_index = (torch.arange(count * shared * size).view(count, -1) * capacity + places.unsqueeze(1)).view(-1)
    value_index = (torch.arange(count * shared).view(count, -1) * capacity + places.unsqueeze(1)).view(-1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = store.keys[layer], store.values[layer]
        keys.view(-1).index_copy_(0, key_index, k[:count].reshape(-1))
        values.view(-1, size).index_copy_(0, value_index, v[:count].reshape(-1, size))
        heads = q.shape[1]
        mixed = _mix(
            q[:count].reshape(count * shared, heads // shared, size),
            keys.view(rows * shared, size, capacity)[: count * shared, :, :width],
            values.view(rows * shared, capacity, size)[: count * shared, :width],
            mask,
        )
        return functional.pad(mixed.reshape(count, heads * size), (0, 0, 0, len(q) - count))

    return attend

"""Choice of the next token on the device: keyed noise, temperature, filters, log-probs, and what it does to a slot."""

import torch
from torch import Tensor

from turnwise.engines.kernels.dispatch import use_triton

STOP_IDS = 8
"""Most stop ids a slot may have; the rest of its row in `stop_ids` is -1."""

_STRIDE = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's constants as int64: the same bits
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def uniforms(keys: Tensor, places: Tensor) -> Tensor:
    """One float64 in [0, 1) per key (64 bits) and absolute position of the token: what the CPU sampler draws there."""
    x = keys + (places.long() + 1) * _STRIDE  # wraps around, as it should
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    x = x ^ _shifted(x, 31)
    return _shifted(x, 11).double() * 2.0**-53


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros: torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def choose(
    logits: Tensor,
    keys: Tensor,
    places: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids (int64) and their log-probs [B] from float32 logits [B, V], by inverting the cumulative distribution.

    A row's result depends on that row alone, and is the CPU sampler's but where the rounding of exp decides a draw.
    `places` are the absolute positions of the tokens drawn. Temperature 0 takes the likeliest token, the lowest id of
    equals, and reports its log-prob in the unscaled distribution. top_k below 1 and top_p from 1 on filter nothing;
    log-probs are those before the filters. A row with NaN gets a NaN log-prob; its id is valid and means nothing.
    """
    noise = None if use_triton(logits) and top_k is None and top_p is None else uniforms(keys, places).unsqueeze(1)
    if use_triton(logits):
        from turnwise.engines.kernels.triton import sampling as triton_sampling

        ids, logprobs, sums = triton_sampling.choose(logits, keys, places, temperature)
        if noise is None:
            return ids, logprobs
        weights = torch.softmax(_scaled(logits, temperature), dim=-1)
        chosen = _drawn(_filtered(weights, top_k, top_p), noise)
        # A row that filters nothing keeps what it would have drawn had nobody filtered.
        ids = torch.where(_unfiltered(temperature, top_k, top_p), ids, chosen)
        return ids, sums.logprobs(ids)
    assert noise is not None
    scaled = _scaled(logits, temperature)
    logp = torch.log_softmax(scaled, dim=-1)
    weights = torch.softmax(scaled, dim=-1)
    if top_k is not None or top_p is not None:
        weights = _filtered(weights, top_k, top_p)
    ids = torch.where(temperature == 0.0, logits.argmax(-1), _drawn(weights, noise))
    return ids, logp.gather(1, ids.unsqueeze(1)).squeeze(1)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits / torch.where(temperature == 0.0, 1.0, temperature).unsqueeze(1)


def _drawn(weights: Tensor, noise: Tensor) -> Tensor:
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding may lift u * total to the total itself, which no token exceeds; stay one step below it.
    highest = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(noise * total, highest)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


def _filtered(weights: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Zero outside the k most likely tokens and, of those, outside the smallest set that reaches top_p of their mass.

    Equal weights rank by id, so the set does not depend on the sorting algorithm.
    """
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        limit = torch.where(top_k < 1, weights.shape[1], top_k).unsqueeze(1)
        ranked = ranked.masked_fill(torch.arange(weights.shape[1], device=weights.device) >= limit, 0.0)
    if top_p is not None:
        share = top_p.double().unsqueeze(1)
        wide = ranked.double()
        cumulative = wide.cumsum(-1)
        before = cumulative - wide
        before[:, 0] = -1.0  # the likeliest token always stays
        ranked = ranked.masked_fill((before >= share * cumulative[:, -1:]) & (share < 1.0), 0.0)
    return torch.zeros_like(weights).scatter_(1, order, ranked)


def _unfiltered(temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    plain = torch.ones_like(temperature, dtype=torch.bool)
    if top_k is not None:
        plain = plain & (top_k < 1)
    if top_p is not None:
        plain = plain & (top_p >= 1.0)
    return plain | (temperature == 0.0)


def advance(
    tokens: Tensor,
    logprobs: Tensor,
    rows: Tensor,
    *,
    active: Tensor,
    last_token: Tensor,
    places: Tensor,
    remaining: Tensor,
    stop_ids: Tensor,
    out_tokens: Tensor,
    out_logprobs: Tensor,
    step: Tensor,
) -> None:
    """Take the tokens drawn in a decode step [B] into the slots that `rows` names (-1: none), all in place.

    Before a step `last_token[slot]` stands at `places[slot]` and has not been fed; afterwards the token drawn does, one
    place further. It is written to line `step` of `out_tokens` and `out_logprobs` [steps, B], where rows without an
    active slot get -1 and 0; then `step` counts one up. A slot ends (`active` 0) with a stop id, with its last
    `remaining` token, and with a NaN log-prob. When all lines are full nothing moves, so no token can be lost. A prompt
    whose last token is the slot's `last_token` begins its turn in the same way.
    """
    if use_triton(tokens):
        from turnwise.engines.kernels.triton import sampling as triton_sampling

        slots = (active, last_token, places, remaining, stop_ids)
        triton_sampling.advance(tokens, logprobs, rows, slots, out_tokens, out_logprobs, step)
        return
    line = int(step)
    if line >= len(out_tokens):
        return
    moving = (rows >= 0) & (active[rows.clamp(min=0).long()] != 0)
    out_tokens[line] = torch.where(moving, tokens, -1)
    out_logprobs[line] = torch.where(moving, logprobs, 0.0)
    slot, token = rows[moving].long(), tokens[moving]
    last_token[slot] = token
    places[slot] += 1
    remaining[slot] -= 1
    ended = (stop_ids[slot] == token.unsqueeze(1)).any(-1) | (remaining[slot] <= 0) | logprobs[moving].isnan()
    active[slot] = (~ended).to(active.dtype)
    step += 1

"""Token choice: one reproducible uniform per position, temperature, top-k, top-p, and the chosen token's logprob."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.samplers.request import SamplingParams

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(keys: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (key, absolute position of the token): the splitmix64 stream of the key, 53 bits."""
    x = keys + (places.astype(np.uint64) + np.uint64(1)) * _STRIDE  # wraps around, as it should
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    x ^= x >> np.uint64(31)
    numbers: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


@dataclass(frozen=True, slots=True)
class Rules:
    """How each row of a batch is drawn; None where no row needs the step."""

    temperature: Tensor | None
    greedy: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Rules":
        """The rules of a batch. Greedy rows keep unscaled logits; the filters cannot change them."""
        temperatures = [p.temperature or 1.0 for p in params]
        greedy = [p.temperature == 0.0 for p in params]
        filtered = [(p.top_k or np.iinfo(np.int64).max, p.top_p) for p in params]
        return cls(
            temperature=_column(temperatures, torch.float32) if any(t != 1.0 for t in temperatures) else None,
            greedy=torch.tensor(greedy) if any(greedy) else None,
            top_k=_column([k for k, _ in filtered], torch.int64) if any(p.top_k for p in params) else None,
            top_p=_column([p for _, p in filtered], torch.float64) if any(p < 1.0 for _, p in filtered) else None,
        )


def _column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


def choose(logits: Tensor, rules: Rules, noise: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """Token ids and logprobs [n] from logits [n, V] by inverting the cumulative distribution at the noise.

    Logprobs are those before top-k and top-p. A row with NaN gets a NaN logprob; its id means nothing.
    """
    scaled = logits if rules.temperature is None else logits / rules.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    weights = torch.softmax(scaled, dim=-1)
    if rules.top_k is not None or rules.top_p is not None:
        weights = _filtered(weights, rules)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding may lift u * total to the total itself, which no token exceeds; stay one step below it.
    highest = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(torch.from_numpy(noise).unsqueeze(1) * total, highest)
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    if rules.greedy is not None:
        ids = torch.where(rules.greedy, logits.argmax(-1), ids)
    return ids, logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)


def _filtered(weights: Tensor, rules: Rules) -> Tensor:
    """Zero outside the k most likely tokens and, of those, outside the smallest set that reaches top_p of their mass.

    Equal weights rank by id, so the set does not depend on the sorting algorithm.
    """
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    if rules.top_k is not None:
        ranked = ranked.masked_fill(torch.arange(ranked.shape[1]) >= rules.top_k, 0.0)
    if rules.top_p is not None:
        wide = ranked.double()
        cumulative = wide.cumsum(-1)
        before = cumulative - wide
        before[:, 0] = -1.0  # the likeliest token always stays
        enough = (before >= rules.top_p * cumulative[:, -1:]) & (rules.top_p < 1.0)
        ranked = ranked.masked_fill(enough, 0.0)
    return torch.zeros_like(weights).scatter_(1, order, ranked)

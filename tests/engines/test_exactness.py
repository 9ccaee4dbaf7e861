"""The search for a regime finds one where there is one, and its proof fails when it should."""

from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.engines.model.attention import Regime
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.policy_model import Attend, ModelInputs
from turnwise.engines.samplers.cpu import threads
from turnwise.engines.samplers.cpu.threads import REGIMES, find_regime, holds

SHAPES = {
    "grouped": DecoderConfig("qwen3", 96, 64, 128, 2, 4, 2, 16, 512),
    "one head for all, odd sizes": DecoderConfig("llama", 101, 60, 90, 1, 3, 1, 20, 300),
    "a head each, long": DecoderConfig("llama", 100, 64, 96, 1, 4, 4, 16, 5000),
    "biases": DecoderConfig("qwen2", 500, 128, 300, 1, 4, 2, 32, 1024, qkv_bias=True),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_regime_is_found_where_products_of_fixed_shape_repeat(shape: str) -> None:
    """Bitwise tests skip without a regime; this one makes sure that a fault of ours cannot hide behind that."""
    noise = torch.Generator().manual_seed(0)
    x, weight = torch.randn(256, 128, generator=noise), torch.randn(96, 128, generator=noise)
    q, keys = torch.randn(4, 192, 16, generator=noise), torch.randn(4, 16, 192, generator=noise)
    values = torch.randn(4, 32, 16, generator=noise)
    product, scores = x @ weight.T, torch.bmm(q, keys)
    mixed = torch.bmm(scores[:, :, :32], values)
    plain = all(torch.equal(x[:rows] @ weight.T, product[:rows]) for rows in (64, 128, 192))
    plain &= all(torch.equal(torch.bmm(q[:, :rows], keys), scores[:, :rows]) for rows in (64, 128))
    plain &= all(torch.equal(torch.bmm(q, keys[:, :, :size]), scores[:, :, :size]) for size in (32, 96, 160))
    plain &= all(torch.equal(torch.bmm(scores[:n, :64, :32], values[:n]), mixed[:n, :64]) for n in (1, 2, 3))
    if not plain:
        pytest.skip("even plain products of padded shapes depend on the batch on this machine")
    assert find_regime(Decoder.fresh(SHAPES[shape], 0)) is not None


def test_the_first_that_holds_is_taken_and_none_when_none_does(
    decoder: Decoder, regime: Regime, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert regime == next(candidate for candidate in REGIMES if holds(decoder, candidate))
    one_row = Regime(1, 1, 1 << 20)
    if holds(decoder, one_row):
        pytest.skip("on this machine no shape of a product changes its rounding")
    monkeypatch.setattr(threads, "REGIMES", (one_row, regime))
    assert find_regime(decoder) == regime
    monkeypatch.setattr(threads, "REGIMES", (one_row,))
    assert find_regime(decoder) is None


class Leaky(Decoder):
    """A decoder whose rows depend on how many there are."""

    def forward(self, inputs: ModelInputs, attend: Attend, **options: Any) -> Tensor:
        return super().forward(inputs, attend, **options) * (1.0 + 1e-6 * len(inputs.tokens))


class LeakyProducts(Decoder):
    """One whose products round otherwise when there are many rows, as a BLAS may."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * (1.0 if len(hidden) < 700 else 1.0 + 1e-6)


@pytest.mark.parametrize("kind", [Leaky, LeakyProducts])
def test_the_proof_fails_when_rows_depend_on_the_batch(decoder: Decoder, regime: Regime, kind: type[Decoder]) -> None:
    assert not holds(kind(decoder.config, dict(decoder.named_parameters())), regime)


@pytest.mark.parametrize("rows", [2, 3, 40])
def test_the_proof_fails_when_the_number_of_queries_matters(
    decoder: Decoder, regime: Regime, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a BLAS that rounds otherwise below a number of rows, whichever it is; a token has two here."""
    allowed = Regime(regime.row_pad, 64, regime.key_block)
    if not holds(decoder, allowed):
        pytest.skip("this machine has a regime, but not one of many query rows")
    plain = torch.bmm

    def other(a: Tensor, b: Tensor) -> Tensor:
        return plain(a, b) * (1.0 + 1e-6) if a.shape[1] <= rows else plain(a, b)

    monkeypatch.setattr(torch, "bmm", other)
    assert holds(decoder, allowed)
    assert not holds(decoder, Regime(regime.row_pad, 1, regime.key_block))


@pytest.mark.parametrize("limit", [32, 96, 224])
def test_the_proof_fails_when_the_length_of_a_sum_matters(
    decoder: Decoder, regime: Regime, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a BLAS that rounds sums longer than `limit` otherwise, which is where processors differ."""
    allowed = Regime(regime.row_pad, regime.query_rows, 32)
    if not holds(decoder, allowed):
        pytest.skip("this machine has a regime, but not one of short sums")
    plain = torch.bmm

    def other(a: Tensor, b: Tensor) -> Tensor:
        return plain(a, b) * (1.0 + 1e-6) if a.shape[2] > limit else plain(a, b)

    monkeypatch.setattr(torch, "bmm", other)
    assert holds(decoder, allowed)
    assert not holds(decoder, Regime(regime.row_pad, regime.query_rows, 256))

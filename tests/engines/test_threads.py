"""The choice of a thread count: measured, proven, and the proof can fail."""

import pytest
import torch

from turnwise.engines import attention
from turnwise.engines.decoder import Attend, Decoder
from turnwise.engines.threads import choose_threads, prove_row_invariance, usable_cores


def test_choice_is_among_the_candidates_and_leaves_the_setting_alone(decoder: Decoder) -> None:
    before = torch.get_num_threads()
    choice = choose_threads(decoder, 0)
    assert torch.get_num_threads() == before
    assert set(choice.seconds_per_step) == {1, usable_cores()}
    assert choice.threads in choice.seconds_per_step and all(s > 0 for s in choice.seconds_per_step.values())
    wanted = choose_threads(decoder, 1)
    assert wanted.threads == 1 and set(wanted.seconds_per_step) == {1}


def test_the_proof_holds_where_plain_products_do(decoder: Decoder) -> None:
    """Bitwise tests skip without the proof; this one makes sure that a fault of ours cannot hide behind that."""
    noise = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 128, generator=noise), torch.randn(96, 128, generator=noise)
    q, keys = torch.randn(4, 64, 16, generator=noise), torch.randn(4, 16, 192, generator=noise)
    values = torch.randn(4, 192, 16, generator=noise)
    scores = torch.bmm(q, keys)
    plain = all(torch.equal(x[:rows] @ weight.T, (x @ weight.T)[:rows]) for rows in (16, 32, 48))
    plain &= all(torch.equal(torch.bmm(q[:, :rows], keys), scores[:, :rows]) for rows in (2, 4, 32))
    plain &= all(torch.equal(torch.bmm(scores[:n], values[:n]), torch.bmm(scores, values)[:n]) for n in (1, 2, 3))
    if not plain:
        pytest.skip("rows of plain matrix products depend on the batch on this machine")
    assert prove_row_invariance(decoder)


class Leaky(Decoder):
    """A decoder whose rows depend on how many there are."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        return super().forward(token_ids, positions, attend) * (1.0 + 1e-6 * len(token_ids))


def test_the_proof_fails_when_rows_depend_on_the_batch(decoder: Decoder, invariant: None) -> None:
    assert not prove_row_invariance(Leaky(decoder.config, dict(decoder.named_parameters())))


def test_the_proof_fails_when_keys_are_summed_across_block_limits(
    decoder: Decoder, invariant: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without fixed blocks the BLAS splits long sums by their total length; where it does not, there is no fault."""
    weights, values = torch.rand(2, 2, 1344), torch.randn(2, 1344, 16)
    weights[:, :, 700:] = 0
    if torch.equal(torch.bmm(weights, values), torch.bmm(weights[:, :, :704], values[:, :704])):
        pytest.skip("this BLAS sums long rows in one go")
    wide = Decoder.fresh(type(decoder.config)("qwen3", 96, 64, 128, 1, 4, 2, 16, 4096, tied=True), 0)
    assert prove_row_invariance(wide)
    monkeypatch.setattr(attention, "KEY_BLOCK", 1 << 20)
    assert not prove_row_invariance(wide)

"""The choice of a thread count: measured, proven, and the proof can fail."""

import os

import pytest
import torch

from turnwise.engines import attention
from turnwise.engines.decoder import Attend, Decoder
from turnwise.engines.threads import choose_threads, prove_row_invariance


def test_choice_is_among_the_candidates_and_leaves_the_setting_alone(decoder: Decoder) -> None:
    before = torch.get_num_threads()
    choice = choose_threads(decoder, 0)
    assert torch.get_num_threads() == before
    assert set(choice.seconds_per_step) == {1, len(os.sched_getaffinity(0))}
    assert choice.threads in choice.seconds_per_step and all(s > 0 for s in choice.seconds_per_step.values())
    wanted = choose_threads(decoder, 1)
    assert wanted.threads == 1 and set(wanted.seconds_per_step) == {1}


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

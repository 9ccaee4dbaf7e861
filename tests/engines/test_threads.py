"""The choice of a thread count and a regime: measured, proven, and told in words a user understands."""

import torch

from turnwise.engines.model.decoder import Decoder
from turnwise.engines.samplers.exactness import REGIMES, holds
from turnwise.engines.samplers.threads import ThreadChoice, choose_threads, usable_cores


def test_choice_is_among_the_candidates_and_leaves_the_setting_alone(decoder: Decoder) -> None:
    before = torch.get_num_threads()
    choice = choose_threads(decoder, 0)
    assert torch.get_num_threads() == before
    assert set(choice.seconds_per_step) == {1, usable_cores()}
    assert choice.threads in choice.seconds_per_step and all(s > 0 for s in choice.seconds_per_step.values())
    wanted = choose_threads(decoder, 1)
    assert wanted.threads == 1 and set(wanted.seconds_per_step) == {1}
    assert wanted.regime in REGIMES and wanted.proven == (wanted.regime if wanted.invariant else None)
    assert holds(decoder, wanted.regime) == wanted.invariant


def test_a_machine_without_an_exact_regime_says_what_that_means() -> None:
    proven = ThreadChoice(1, REGIMES[1], {1: 0.1}, invariant=True)
    other = ThreadChoice(1, REGIMES[0], {1: 0.1}, invariant=False)
    assert proven.proven is REGIMES[1] and other.proven is None
    assert "do not depend" in proven.promise()
    assert "same seed can write other tokens" in other.promise()

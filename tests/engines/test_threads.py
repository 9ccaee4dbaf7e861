"""The choice of a thread count and a regime: measured, proven, and told in words a user understands."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from written import Written, write

from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.samplers.cpu.threads import REGIMES, UNPADDED, ThreadChoice, choose_threads, holds, usable_cores
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.request import NoiseKey, SamplingParams
from turnwise.errors import EngineError


class Foreign(PolicyModel):
    """Another implementation of the same model: nothing of it is known but the protocol."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__()
        self.inner, self.shape = inner, inner.shape

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def logits(self, hidden: Any) -> Any:
        return self.inner.logits(hidden)

    def scores(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.scores(*args, **kwargs)

    def weights(self) -> Any:
        return self.inner.weights()

    def load(self, weights: Any) -> None:
        self.inner.load(weights)

    def without_adapter(self) -> Any:
        return self.inner.without_adapter()

    def save(self, folder: Any) -> None:
        self.inner.save(folder)


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


def test_a_proof_nobody_asks_for_is_not_made(decoder: Decoder) -> None:
    choice = choose_threads(decoder, 1, batch_invariant=False)
    assert (choice.invariant, choice.proven, choice.regime) == (False, None, UNPADDED)
    assert "engine.batch_invariant=false" in choice.promise()


def test_other_implementations_are_measured_and_promise_nothing(decoder: Decoder) -> None:
    model = Foreign(decoder)
    choice = choose_threads(model, 1)
    assert (choice.invariant, choice.proven, choice.regime) == (False, None, UNPADDED)
    assert choice.seconds_per_step[1] > 0
    assert "proven for the native implementation only" in choice.promise()

    def written(writer: PolicyModel) -> Written:
        async def body() -> Written:
            sampler = TorchSampler(writer, decode=str, max_batch=2, threads=1, regime=choice.regime)
            try:
                return await write(sampler, "c", [3, 1, 4], SamplingParams(20), NoiseKey(0, 0, "s", 0))
            finally:
                await sampler.close()

        return asyncio.run(body())

    assert written(model) == written(decoder)
    model.shape = replace(model.shape, no_caching="layer 0 is recurrent")
    with pytest.raises(EngineError, match="layer 0 is recurrent"):
        choose_threads(model, 1)

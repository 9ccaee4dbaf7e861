"""Sampler and learner agree bit by bit over turns with tools, and published weights write from the next token on."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import accumulate, score
from torch import Tensor
from written import Written, write

import turnwise
from turnwise.config import LearnerConfig
from turnwise.engines.learners.learner import Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.losses import PolicyTokens
from turnwise.engines.model.attention import Regime
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.lora import LoraDecoder
from turnwise.engines.samplers.cpu.threads import REGIMES, find_regime
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.request import NoiseKey, SamplingParams
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError
from turnwise.types import Ledger, Origin

TINY = Path(next(iter(turnwise.__path__))) / "engines" / "bundled" / "tiny"
PACKED_TOLERANCE = 2e-4


def copy_of(decoder: Decoder) -> Decoder:
    return Decoder(decoder.config, {name: tensor.clone() for name, tensor in decoder.tensors().items()})


@functools.cache
def regime_of(decoder: Decoder) -> Regime:
    """The one proven here, else any: most of what a sampler does needs none."""
    return find_regime(decoder) or REGIMES[0]


def with_sampler(decoder: Decoder, body: Callable[[TorchSampler], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        sampler = TorchSampler(
            copy_of(decoder), **{"decode": str, "max_batch": 8, "threads": 1, "regime": regime_of(decoder), **options}
        )
        try:
            return await asyncio.wait_for(body(sampler), 60)
        finally:
            await sampler.close()

    return asyncio.run(run())


def ids(length: int, seed: int, vocab: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(3, vocab, size=length).tolist()
    return drawn


def full(tensors: dict[str, Tensor]) -> FullWeights:
    return FullWeights({name: tuple(tensor.shape) for name, tensor in tensors.items()}, iter(tensors.items()))


async def episode(sampler: TorchSampler, number: int, turns: int, temperature: float, vocab: int) -> tuple[Ledger, Any]:
    """Prompt, then turns of policy tokens with tool replies and template glue between; returns ledger and versions."""
    ledger = Ledger()
    ledger.append(ids(40, 5, vocab) + ids(3 + 11 * number, number, vocab), Origin.PROMPT, 0)
    versions = []
    for turn in range(turns):
        params = SamplingParams(max_tokens=9 + 5 * number, temperature=temperature)
        noise = NoiseKey(0, 0, f"s{number}", 0)
        done = await write(sampler, f"c{number}", list(ledger.token_ids), params, noise)
        ledger.append(done.token_ids, Origin.POLICY, turn, done.logprobs, done.policy_version)
        versions.append(done.policy_version)
        ledger.append(ids(7 + turn, 90 + number, vocab), Origin.TOOL, turn)
        ledger.append([4, 5], Origin.TEMPLATE, turn)
    return ledger, versions


def packed(ledgers: list[Ledger]) -> tuple[Tensor, list[int], Tensor]:
    mask = torch.tensor([flag for ledger in ledgers for flag in ledger.loss_mask])
    tokens = torch.tensor([token for ledger in ledgers for token in ledger.token_ids])
    return tokens, [len(ledger) for ledger in ledgers], mask.nonzero().squeeze(1)


def recorded(ledgers: list[Ledger]) -> list[float]:
    return [lp for ledger in ledgers for lp, flag in zip(ledger.logprobs, ledger.loss_mask, strict=True) if flag]


def learner_of(decoder: Decoder, temperature: float, regime: Regime) -> LocalLearner:
    return LocalLearner(decoder, LearnerConfig(lr=2e-3), temperature=temperature, chunk_tokens=64, regime=regime)


def push(learner: LocalLearner, case: tuple[Tensor, list[int], Tensor]) -> None:
    """A step away from what was sampled."""

    def loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
        return found.logprobs.mean(), {}

    accumulate(learner, case, loss)
    learner.optim_step()


def models(decoder: Decoder) -> dict[str, Decoder]:
    return {"random": decoder, "tiny": Decoder.read(TINY)}


@pytest.mark.parametrize("name", ["random", "tiny"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_learner_equals_sampler_bit_by_bit(decoder: Decoder, name: str, temperature: float) -> None:
    model = models(decoder)[name]
    regime = find_regime(model)
    if regime is None:
        pytest.skip("no regime on this machine rounds alike in every batch")
    vocab = model.config.vocab_size

    async def body(sampler: TorchSampler) -> list[Ledger]:
        runs = await asyncio.gather(*(episode(sampler, n, 3, temperature, vocab) for n in range(5)))
        return [ledger for ledger, _ in runs]

    ledgers: list[Ledger] = with_sampler(model, body)
    learner = learner_of(copy_of(model), temperature, regime)
    case = packed(ledgers)
    assert len(case[2]) == 3 * (9 + 14 + 19 + 24 + 29)
    assert score(learner, case, Who.SAMPLER).tolist() == recorded(ledgers)
    fast = score(learner, case)
    torch.testing.assert_close(fast, torch.tensor(recorded(ledgers)), atol=PACKED_TOLERANCE, rtol=PACKED_TOLERANCE)
    # Not for want of contrast: one step later they differ.
    push(learner, case)
    assert (score(learner, case, Who.SAMPLER) - torch.tensor(recorded(ledgers))).abs().max() > 0.01


@pytest.mark.parametrize("lora", [False, True])
def test_published_weights_write_and_carry_their_version(decoder: Decoder, regime: Regime, lora: bool) -> None:
    start = LoraDecoder(copy_of(decoder), rank=4, alpha=32.0, seed=1) if lora else copy_of(decoder)
    learner = learner_of(start, 1.0, regime)

    async def body(sampler: TorchSampler) -> None:
        before, versions = await episode(sampler, 0, 2, 1.0, 96)
        assert versions == [3, 3] and sampler.cached_bytes > 0
        assert score(learner, packed([before]), Who.SAMPLER).tolist() == recorded([before])
        for _ in range(4):
            push(learner, packed([before]))
        await sampler.publish(learner.weights(), version=4)
        assert sampler.policy_version == 4 and sampler.cached_bytes == 0
        # The conversation goes on from its past without the old policy's cache; a sibling finds no old prefix either.
        reused = sampler.stats.reused_tokens
        more = SamplingParams(max_tokens=12)
        past = list(before.token_ids)
        done = await write(sampler, "c0", past, more, NoiseKey(0, 0, "s0", 0))
        again, versions = await episode(sampler, 0 + 1, 1, 1.0, 96)
        assert done.policy_version == 4 and versions == [4]
        assert sampler.stats.reused_tokens - reused <= 40  # the prefix the two share by now
        whole = Ledger()
        whole.append(past, Origin.PROMPT, 0)
        whole.append(done.token_ids, Origin.POLICY, 0, done.logprobs, done.policy_version)
        for ledger in (whole, again):
            assert score(learner, packed([ledger]), Who.SAMPLER).tolist() == recorded([ledger])

    with_sampler(decoder, body, policy_version=3)


def test_a_turn_being_written_goes_on_with_the_new_weights(decoder: Decoder, regime: Regime) -> None:
    learner = learner_of(copy_of(decoder), 1.0, regime)
    old = learner_of(copy_of(decoder), 1.0, regime)
    start = ids(50, 2, 96)

    async def body(sampler: TorchSampler) -> Written:
        prompt = Ledger()
        prompt.append(start, Origin.PROMPT, 0)
        prompt.append(ids(30, 3, 96), Origin.POLICY, 0, [0.0] * 30, 0)
        for _ in range(4):
            push(learner, packed([prompt]))
        turn = asyncio.create_task(write(sampler, "c", start, SamplingParams(max_tokens=400), NoiseKey(0, 0, "s", 0)))
        while sampler.stats.decoded_tokens < 20:
            await asyncio.sleep(0.001)
        await sampler.publish(learner.weights(), version=1)
        return await turn

    done: Written = with_sampler(decoder, body)
    assert done.policy_version == 0, "the oldest version that wrote any of it"
    case = (torch.tensor([*start, *done.token_ids]), [450], torch.arange(50, 450))
    by_old, by_new = (score(side, case, Who.SAMPLER).tolist() for side in (old, learner))
    from_old = [got == lp for got, lp in zip(done.logprobs, by_old, strict=True)]
    from_new = [got == lp for got, lp in zip(done.logprobs, by_new, strict=True)]
    change = from_old.index(False)
    assert 20 <= change < 400
    assert all(from_old[:change]) and all(from_new[change:])


def test_weights_of_another_model_are_refused(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        first = await write(sampler, "a", ids(9, 1, 96), SamplingParams(8), NoiseKey(0, 0, "s", 0))
        tensors, norm, down = dict(decoder.weights()), "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
        cut = {**tensors, norm: tensors[norm][:-1]}
        lacking = {name: tensor for name, tensor in tensors.items() if name != down}
        for wrong, word in ((cut, norm), (lacking, down), ({**tensors, "extra": cut[norm]}, "extra")):
            with pytest.raises(EngineError, match=word):
                await sampler.publish(full(wrong), 9)
        second = await write(sampler, "b", ids(9, 1, 96), SamplingParams(8), NoiseKey(0, 0, "s", 0))
        assert second == first and second.policy_version == 0

    with_sampler(decoder, body)


def test_publishing_to_a_closed_sampler_is_told(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        await sampler.close()
        with pytest.raises(EngineError, match="closed"):
            await sampler.publish(full(dict(decoder.weights())), 1)

    with_sampler(decoder, body)

"""A sampler that sleeps holds no keys and values, and goes on as if it had not slept; every order is obeyed meanwhile."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from images import AN_IMAGE
from written import write

from turnwise.engines.model.attention import Regime
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.samplers.cpu.threads import REGIMES, find_regime
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Logprobs
from turnwise.engines.weight_updates import Adapter, FullWeights
from turnwise.errors import EngineError
from turnwise.ledger import MediaSpan
from turnwise.types import Completion, FinishReason, VersionRun

LONG = SamplingParams(max_tokens=300, temperature=0.9)


def copied(decoder: Decoder, scale: float = 1.0) -> Decoder:
    return Decoder(decoder.config, {name: scale * tensor for name, tensor in decoder.tensors().items()})


def update(decoder: Decoder) -> FullWeights:
    return FullWeights(decoder.weight_shapes(), decoder.weights())


def request(number: int, params: SamplingParams = LONG, **more: Any) -> Request:
    ids = np.random.default_rng(number).integers(96, size=40 + 30 * number)
    return Request(f"c{number}", ids, params, NoiseKey(0, 0, "s", number), **more)


def plain(done: Completion) -> tuple[list[int], list[float], FinishReason]:
    return done.token_ids.tolist(), done.logprobs.tolist(), done.finish_reason


def run(decoder: Decoder, body: Any, **options: Any) -> Any:
    regime = options.pop("regime", None) or find_regime(decoder) or REGIMES[0]

    async def inside() -> Any:
        sampler = TorchSampler(decoder, decode=str, threads=1, regime=regime, **{"max_batch": 3, **options})
        try:
            return await asyncio.wait_for(body(sampler), 60)
        finally:
            await sampler.close()

    return asyncio.run(inside())


async def until(sampler: TorchSampler, tokens: int) -> None:
    while sampler.stats.decoded_tokens < tokens:
        await asyncio.sleep(0.001)


def test_turns_go_on_as_if_nobody_had_slept(decoder: Decoder, regime: Regime) -> None:
    async def write_all(sampler: TorchSampler, naps: int) -> list[Completion]:
        turns = [asyncio.create_task(sampler.generate(request(number))) for number in range(5)]
        for nap in range(naps):
            await until(sampler, 40 * (nap + 1))
            await sampler.sleep()
            await sampler.sleep()
            assert sampler._batcher.bytes == 0 and sampler.cached_bytes == 0
            before = sampler.stats.decoded_tokens
            await asyncio.sleep(0.01)
            assert sampler.stats.decoded_tokens == before
            await sampler.wake()
            await sampler.wake()
            assert sampler._batcher.bytes > 0
        return await asyncio.gather(*turns)

    awake, slept = (run(decoder, lambda s, n=naps: write_all(s, n), regime=regime) for naps in (0, 3))
    assert [plain(done) for done in awake] == [plain(done) for done in slept]


def test_orders_are_obeyed_in_its_sleep(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        turns = [asyncio.create_task(sampler.generate(request(number))) for number in range(3)]
        await until(sampler, 30)
        await sampler.sleep()
        late = asyncio.create_task(sampler.generate(request(3)))
        turns[0].cancel()
        await sampler.release("c1")
        await sampler.publish(update(copied(decoder, 0.5)), 4)
        assert sampler.policy_version == 4 and sampler._batcher.bytes == 0
        with pytest.raises(EngineError, match="not the weights of this model"):
            await sampler.publish(FullWeights({"x": (1,)}, iter(())), 5)
        await sampler.wake()
        _, second, third, fresh = await asyncio.gather(*turns, late, return_exceptions=True)
        assert fresh.versions == (VersionRun(4, 300),)
        for done in (second, third):
            (old, some), (new, rest) = ((run.version, run.tokens) for run in done.versions)
            assert (old, new) == (0, 4) and some > 0 and some + rest == 300 == len(done.token_ids)
        await sampler.sleep()
        waits = asyncio.create_task(sampler.generate(request(6)))
        await asyncio.sleep(0.01)
        await sampler.close()
        with pytest.raises(EngineError, match="closed"):
            await waits

    run(copied(decoder), body)


def test_every_token_carries_its_version(decoder: Decoder, regime: Regime) -> None:
    """What came before a publish is the old weights' and what comes after the new ones', as if they had read it all."""
    other = copied(decoder, 0.9)

    async def body(sampler: TorchSampler) -> tuple[Completion, Completion]:
        turn = asyncio.create_task(sampler.generate(request(0)))
        await until(sampler, 20)
        for version, weights in ((1, decoder), (2, other)):  # one that writes nothing leaves no run
            await sampler.publish(update(weights), version)
        return await turn, await sampler.generate(request(1))

    across, after = run(copied(decoder), body, regime=regime)
    alone = run(copied(decoder), lambda sampler: sampler.generate(request(0)), regime=regime)
    old, written = across.versions[0].version, across.versions[0].tokens
    assert old == 0 and across.versions[-1].version == 2 and 20 <= written < 300
    kept = sum(run.tokens for run in across.versions[:-1])  # versions 0 and 1 are the same weights
    assert across.token_ids[:kept].tolist() == alone.token_ids[:kept].tolist()
    assert after.versions == (VersionRun(2, 300),) and across.policy_version == 0

    rest = Request("rest", np.concatenate((request(0).token_ids, across.token_ids[:kept])),
                   SamplingParams(300 - kept, 0.9), request(0).noise)  # fmt: skip
    continued = run(other, lambda sampler: sampler.generate(rest), regime=regime)
    assert across.token_ids[kept:].tolist() == continued.token_ids.tolist()
    assert across.logprobs[kept:].tolist() == continued.logprobs.tolist()


def test_weights_that_break_off_end_the_sampler(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        shapes = decoder.weight_shapes()
        with pytest.raises(EngineError, match="are missing"):
            await sampler.publish(FullWeights(shapes, iter(list(decoder.weights())[:3])), 1)
        with pytest.raises(EngineError, match="worker failed"):  # half of the weights may be new
            await write(sampler, "later", [1, 2], SamplingParams(2), NoiseKey(0, 0, "s", 0))

    run(copied(decoder), body)


def test_what_it_cannot_do_is_refused_by_name(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(sampler: TorchSampler) -> None:
        assert sampler.capabilities.logprobs is Logprobs.SCALED and sampler.capabilities.sleeps
        assert sampler.capabilities.updates == {FullWeights} and not sampler.capabilities.media
        with pytest.raises(EngineError, match=r"torch sampler reads text only, and 'c0' has 1 image"):
            await sampler.generate(request(0, media=(MediaSpan(AN_IMAGE, 3),)))
        with pytest.raises(EngineError, match="takes full weights, not Adapter"):
            await sampler.publish(Adapter(None), 1)

    run(decoder, body)
    recurrent = copied(decoder)
    recurrent.shape = type(decoder.shape)(96, 64, 512, decoder.shape.caches, no_caching="layer 3 is recurrent (mamba)")
    with pytest.raises(EngineError, match=r"cannot write with this model: layer 3 is recurrent \(mamba\)"):
        run(recurrent, body, regime=REGIMES[0])
    assert torch.get_num_threads() == 1

"""The GPU sampler writes what the CPU sampler writes, whatever the pages, runs and passes are; on the CPU and a GPU."""

import asyncio
import gc
import itertools
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import architectures
import numpy as np
import pytest
import torch
from images import AN_IMAGE
from written import Written, key, letters, prompt, write

from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.engines.samplers.cpu.threads import REGIMES
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.gpu.cuda import CudaSampler
from turnwise.engines.samplers.gpu.steps import page_bytes
from turnwise.engines.samplers.in_process import InProcessSampler
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError
from turnwise.ledger import MediaSpan
from turnwise.types import Completion, FinishReason, VersionRun

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.9)


def close_to(found: Any, expected: Any) -> bool:
    """The same tokens with the same log-probs, but for rounding."""
    if isinstance(found, Written):
        same = (found.token_ids, *found[2:]) == (expected.token_ids, *expected[2:])
        return same and np.allclose(found.logprobs, expected.logprobs, atol=1e-3)
    return len(found) == len(expected) and all(map(close_to, found, expected))


def fail(text: str) -> None:
    """On the worker's thread: the worker ends, and whoever waits hears why."""
    raise AssertionError(text)


def with_sampler(
    model: PolicyModel, body: Callable[[CudaSampler], Awaitable[Any]], device: str = "cpu", *, pages: int = 400,
    **options: Any,
) -> Any:  # fmt: skip
    """Run an async body with a sampler that is closed on every path; nothing may hang."""
    first = next(model.parameters())

    async def run() -> Any:
        given: dict[str, Any] = {"max_batch": 8, "invariant": False, "steps_per_run": 5, "prefill_tokens": 64}
        given |= {"say": fail, "decode": letters}
        sampler = CudaSampler(
            model,
            device=torch.device(device),
            cache_bytes=pages * page_bytes(model.shape.caches, first.dtype),
            **given | options,
        )
        try:
            return await asyncio.wait_for(body(sampler), 60)
        finally:
            await sampler.close()

    return asyncio.run(run())


def on_the_cpu(model: PolicyModel, body: Callable[[InProcessSampler], Awaitable[Any]], **options: Any) -> Any:
    """The same by the torch sampler, in which one step writes one token."""

    async def run() -> Any:
        given = {"decode": letters, "max_batch": 8, "threads": 1, "regime": REGIMES[0], **options}
        sampler = TorchSampler(model, **given)
        try:
            return await asyncio.wait_for(body(sampler), 60)
        finally:
            await sampler.close()

    return asyncio.run(run())


async def turns(
    sampler: InProcessSampler, name: str, noise: NoiseKey, start: list[int], count: int = 2
) -> list[Written]:
    """So many turns of a conversation, a reply of three tokens between them."""
    done: list[Written] = []
    for _ in range(count):
        done.append(await write(sampler, name, start, PARAMS, noise))
        start = [*start, *done[-1].token_ids, 5, 6, 7]
    return done


async def crowd(sampler: InProcessSampler) -> list[list[Written]]:
    """Conversations of many lengths, two by two with the same beginning."""
    starts = [prompt(11 + 13 * (i // 2), seed=i // 2) + prompt(i % 2, seed=i) for i in range(12)]
    return await asyncio.gather(*(turns(sampler, f"c{i}", key(i), start) for i, start in enumerate(starts)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"steps_per_run": 1}, {"prefill_tokens": 7, "max_batch": 3}, {"invariant": True, "steps_per_run": 8}],
)
def test_it_writes_what_the_torch_sampler_writes(decoder: Decoder, device: str, options: dict[str, Any]) -> None:
    expected = on_the_cpu(decoder, crowd)
    assert close_to(with_sampler(decoder, crowd, device, **options), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_too_few_pages_cost_time_and_no_token(decoder: Decoder, device: str) -> None:
    expected = on_the_cpu(decoder, crowd)

    async def body(sampler: CudaSampler) -> Any:
        done = await crowd(sampler)
        assert sampler._batcher._cache.evicted > 0 and sampler.stats.preempted > 0
        return done

    assert close_to(with_sampler(decoder, body, device, pages=9), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_every_way_to_draw_in_one_batch(decoder: Decoder, device: str) -> None:
    ways = [
        SamplingParams(20, temperature=0.0),
        SamplingParams(20, temperature=1.3),
        SamplingParams(20, top_k=3),
        SamplingParams(20, temperature=0.8, top_p=0.7),
        SamplingParams(20, top_k=5, top_p=0.9),
    ]

    async def body(sampler: InProcessSampler) -> list[Written]:
        plain = [write(sampler, f"p{i}", prompt(20, i), way, key(i)) for i, way in enumerate(ways[:2])]
        first = await asyncio.gather(*plain)  # nobody filters
        every = [write(sampler, f"c{i}", prompt(20, i), way, key(i)) for i, way in enumerate(ways)]
        return first + await asyncio.gather(*every)

    assert close_to(with_sampler(decoder, body, device), on_the_cpu(decoder, body))


def test_a_prompt_is_computed_once_for_siblings(decoder: Decoder) -> None:
    start = prompt(200, seed=5)

    async def body(sampler: CudaSampler) -> None:
        params = SamplingParams(max_tokens=2)
        await asyncio.gather(*(write(sampler, f"c{i}", start, params, key(i)) for i in range(8)))
        assert sampler.stats.prefilled_tokens == 200 + 7 * (200 - 192)
        assert sampler.stats.reused_tokens == 7 * 192 and sampler.stats.decoded_tokens == 16
        assert sampler.stats.peak_batch == 8

    with_sampler(decoder, body, prefill_tokens=256)


def test_a_kept_conversation_feeds_only_what_is_new(decoder: Decoder) -> None:
    async def body(sampler: CudaSampler) -> None:
        await turns(sampler, "c", key(), prompt(50), count=3)
        assert sampler.stats.prefilled_tokens == 50 + 2 * 4, "the last token of a turn and the reply"
        assert sampler.cached_bytes == sampler._batcher.bytes // 400 * -(-(50 + 2 * 27 + 23) // 32)
        await sampler.release("c")
        await write(sampler, "d", prompt(3), SamplingParams(0), key())  # orders are obeyed in turn
        assert sampler.cached_bytes == 0

    with_sampler(decoder, body)


@pytest.mark.parametrize("device", DEVICES)
def test_stop_ids_and_strings_end_a_turn_inside_a_run(decoder: Decoder, device: str) -> None:
    start = prompt(30, seed=1)

    async def body(sampler: CudaSampler) -> None:
        free = await write(sampler, "free", start, SamplingParams(max_tokens=40), key())
        assert len(free.token_ids) == 40 and free.finish_reason is FinishReason.LENGTH
        absent = sorted(set(range(96)) - set(free.token_ids))[:12]
        for number, at in enumerate((0, 20, 23, 39)):
            stop = free.token_ids[at]
            cut = free.token_ids.index(stop) + 1
            for more in (frozenset(absent[:3]), frozenset(absent)):  # few enough for the device, and too many
                params = SamplingParams(40, stop_ids=more | {stop})
                by_id = await write(sampler, f"id {number} {len(more)}", start, params, key())
                assert by_id.token_ids == free.token_ids[:cut] and by_id.finish_reason is FinishReason.STOP
        text = letters(free.token_ids)
        for number, words in enumerate((text[23:29], text[7:8], text[38:40])):
            cut = text.index(words) + len(words)
            name, params = f"text {number}", SamplingParams(40, stop_strings=("never\n", words))
            by_text = await write(sampler, name, start, params, key())
            assert letters(by_text.token_ids) == text[:cut] and by_text.finish_reason is FinishReason.STOP
            # What the device wrote behind it is gone, and the conversation goes on as if it had not been written.
            again = [*start, *by_text.token_ids, 1, 2]
            assert close_to(
                await write(sampler, name, again, PARAMS, key(3)),
                await write(sampler, name + "'", again, PARAMS, key(3)),
            )

    with_sampler(decoder, body, device)


def test_stop_strings_are_found_late_in_a_long_turn(decoder: Decoder) -> None:
    start = prompt(10, seed=2)

    async def body(sampler: CudaSampler) -> None:
        free = await write(sampler, "free", start, SamplingParams(max_tokens=150), key())
        text = letters(free.token_ids)
        at = next(i for i in range(110, 140) if text.index(text[i : i + 6]) == i)
        cut = await write(sampler, "cut", start, SamplingParams(150, stop_strings=(text[at : at + 6],)), key())
        assert letters(cut.token_ids) == text[: at + 6]

    with_sampler(decoder, body)


def test_length_limits(decoder: Decoder) -> None:
    context = 512

    async def body(sampler: CudaSampler) -> None:
        assert sampler.context_length == context
        for count in (1, 2, 5, 6, 7):  # around the five tokens of a run
            done = await write(sampler, f"c{count}", prompt(30), SamplingParams(count), key())
            assert len(done.token_ids) == count and done.finish_reason is FinishReason.LENGTH
        near = await write(sampler, "near", prompt(context - 3), SamplingParams(max_tokens=10), key())
        assert len(near.token_ids) == 3 and near.finish_reason is FinishReason.LENGTH
        for name, length, most in (("full", context, 10), ("over", context + 9, 10), ("none", 4, 0)):
            empty = await write(sampler, name, prompt(length), SamplingParams(max_tokens=most), key())
            assert empty == Written((), (), FinishReason.LENGTH, 7)
        again = [*prompt(context - 3), *near.token_ids]
        assert (await write(sampler, "near", again, SamplingParams(5), key())).token_ids == ()

    with_sampler(decoder, body, policy_version=7)


def test_what_does_not_fit_into_the_cache_is_refused_by_the_knob(decoder: Decoder) -> None:
    async def body(sampler: CudaSampler) -> None:
        with pytest.raises(EngineError, match=r"room for 128: raise engine\.memory_fraction"):
            await write(sampler, "long", prompt(140), SamplingParams(4), key())
        with pytest.raises(EngineError, match=r"filled the cache of 128 tokens: raise engine\.memory_fraction"):
            await write(sampler, "grows", prompt(100), SamplingParams(100), key())
        assert len((await write(sampler, "short", prompt(100), SamplingParams(20), key())).token_ids) == 20

    with_sampler(decoder, body, pages=4)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_fails_its_request_and_no_other(decoder: Decoder, device: str) -> None:
    poisoned = Decoder(decoder.config, {name: p.detach().clone() for name, p in decoder.named_parameters()})
    with torch.no_grad():
        poisoned.embed[95] = torch.inf  # whoever reads token 95 computes NaN
        assert poisoned.head is not None
        poisoned.head[95] = poisoned.head[95] * 0.0  # seldom written, and then seldom read
    start = [i % 95 for i in prompt(40)]

    async def body(sampler: CudaSampler) -> None:
        bad = [write(sampler, f"bad {i}", [*start[:i], 95], SamplingParams(9), key()) for i in (3, 33)]
        results = await asyncio.gather(*bad, turns(sampler, "good", key(), start), return_exceptions=True)
        assert all(isinstance(result, EngineError) and "NaN" in str(result) for result in results[:2])
        for index in range(3):  # their pages are used again, and must not remember
            assert close_to(await turns(sampler, f"after {index}", key(), start), results[2])

    with_sampler(poisoned, body, device, pages=8)


def test_bad_requests_fail_alone(decoder: Decoder) -> None:
    async def body(sampler: CudaSampler) -> None:
        good = asyncio.create_task(write(sampler, "good", prompt(5), SamplingParams(50), key()))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="still writing"):
            await write(sampler, "good", prompt(5), SamplingParams(5), key())
        with pytest.raises(EngineError, match="empty"):
            await write(sampler, "bad", [], SamplingParams(5), key())
        request = Request("seen", np.array([1]), SamplingParams(4), key(), (MediaSpan(AN_IMAGE, 0),))
        with pytest.raises(EngineError, match="cuda sampler reads text only"):
            await sampler.generate(request)
        first = await good
        with pytest.raises(EngineError, match="changed earlier tokens"):
            await write(sampler, "good", prompt(60, seed=9), SamplingParams(5), key())
        assert (await write(sampler, "good", [*prompt(5), *first.token_ids, 4], SamplingParams(5), key())).token_ids

    with_sampler(decoder, body)


@pytest.mark.parametrize("device", DEVICES)
def test_cancelled_requests_free_their_slot_and_pages(decoder: Decoder, device: str) -> None:
    async def body(sampler: CudaSampler) -> None:
        params = SamplingParams(max_tokens=200)
        tasks = [asyncio.create_task(write(sampler, f"c{i}", prompt(20, i), params, key(i))) for i in range(5)]
        await until(sampler, 10, *tasks)
        for task in tasks[:4]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[:4])
        assert isinstance(results[4], Written) and len(results[4].token_ids) == 200
        # The same conversation may begin again, with what it knew before, and there is room for all pages at once.
        again = await write(sampler, "c0", prompt(20), SamplingParams(4), key())
        assert len(again.token_ids) == 4
        await sampler.release("c4")
        assert len((await write(sampler, "all", prompt(60), SamplingParams(200), key())).token_ids) == 200

    with_sampler(decoder, body, device, max_batch=2, pages=16)


def copied(decoder: Decoder, scale: float = 1.0) -> Decoder:
    return Decoder(decoder.config, {name: scale * tensor for name, tensor in decoder.tensors().items()})


def long_request(number: int) -> Request:
    ids = np.random.default_rng(number).integers(96, size=40 + 30 * number)
    return Request(f"c{number}", ids, SamplingParams(90, 0.9), NoiseKey(0, 0, "s", number))


async def until(sampler: CudaSampler, tokens: int, *tasks: asyncio.Task[Any]) -> None:
    """Until so much is written by tasks of which none ends before, least of all with an error."""
    while sampler.stats.decoded_tokens < tokens:
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.001)


def plain(done: Completion) -> Written:
    return Written(tuple(done.token_ids.tolist()), tuple(done.logprobs.tolist()), done.finish_reason, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_turns_go_on_as_if_nobody_had_slept(decoder: Decoder, device: str) -> None:
    async def write_all(sampler: CudaSampler, naps: int) -> list[Written]:
        tasks = [asyncio.create_task(sampler.generate(long_request(number))) for number in range(4)]
        for nap in range(naps):
            await until(sampler, 40 * (nap + 1), *tasks)
            await sampler.sleep()
            await sampler.sleep()
            assert sampler._batcher.bytes == 0 and sampler.cached_bytes == 0
            before = sampler.stats.decoded_tokens
            await asyncio.sleep(0.01)
            assert sampler.stats.decoded_tokens == before
            await sampler.wake()
            await sampler.wake()
            assert sampler._batcher.bytes > 0
        return [plain(done) for done in await asyncio.gather(*tasks)]

    awake, slept = (with_sampler(decoder, lambda s, n=naps: write_all(s, n), device, max_batch=3) for naps in (0, 3))
    assert close_to(awake, slept)


@pytest.mark.parametrize("device", DEVICES)
def test_every_token_carries_its_version(decoder: Decoder, device: str) -> None:
    """What came before a publish is the old weights' and what comes after the new ones', as if they had read it all."""
    other, reached, publishing = copied(decoder, 0.9), threading.Event(), threading.Event()
    asked = replace(
        long_request(0), params=SamplingParams(90, 0.9, stop_strings=("never",))
    )  # stop texts are decoded to find

    def decode(token_ids: Sequence[int]) -> str:
        """On the worker's thread, which waits in the middle of the turn until new weights are there for it."""
        if len(token_ids) >= 20:
            reached.set()
            publishing.wait(30)
        return letters(token_ids)

    async def body(sampler: CudaSampler) -> tuple[Completion, Completion]:
        turn = asyncio.create_task(sampler.generate(asked))
        assert await asyncio.to_thread(reached.wait, 30)
        refused = asyncio.create_task(sampler.publish(FullWeights({"x": (1,)}, iter(())), 5))
        taken = [
            asyncio.create_task(sampler.publish(FullWeights(weights.weight_shapes(), weights.weights()), version))
            for version, weights in ((1, decoder), (2, other))
        ]
        await asyncio.sleep(0)  # all three have come before the worker goes on
        publishing.set()
        with pytest.raises(EngineError, match="not the weights of this model"):
            await refused
        await asyncio.gather(*taken)
        return await turn, await sampler.generate(long_request(1))

    across, after = with_sampler(copied(decoder), body, device, decode=decode)
    alone = with_sampler(copied(decoder), lambda sampler: sampler.generate(long_request(0)), device)
    assert across.versions[0].version == 0 and across.versions[-1].version == 2
    kept = sum(run.tokens for run in across.versions[:-1])  # versions 0 and 1 are the same weights
    assert 20 <= kept < 90 and across.token_ids[:kept].tolist() == alone.token_ids[:kept].tolist()
    assert after.versions == (VersionRun(2, 90),)
    ids = np.concatenate((long_request(0).token_ids, across.token_ids[:kept]))
    rest = Request("rest", ids, SamplingParams(90 - kept, 0.9), long_request(0).noise)
    continued = with_sampler(other, lambda sampler: sampler.generate(rest), device)
    assert across.token_ids[kept:].tolist() == continued.token_ids.tolist()
    assert np.allclose(across.logprobs[kept:], continued.logprobs, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["publish", "sleep"])
def test_orders_that_never_end_keep_no_turn_from_being_written(decoder: Decoder, device: str, order: str) -> None:
    """Each takes what was computed of the prompts, and the next is there before they are computed anew."""
    asked = [Request(f"c{i}", prompt(100 + i, i), SamplingParams(12, 0.9), key(i)) for i in range(4)]

    async def write_all(sampler: CudaSampler, disturbed: bool) -> list[list[int]]:
        turns = [asyncio.create_task(sampler.generate(request)) for request in asked]

        async def disturb() -> None:
            while not all(turn.done() for turn in turns):
                if order == "publish":
                    await sampler.publish(FullWeights(decoder.weight_shapes(), decoder.weights()), 1)
                else:
                    await sampler.sleep()
                    await sampler.wake()

        await asyncio.gather(*(disturb() for _ in range(2 if disturbed else 0)))  # one is always in the inbox
        return [done.token_ids.tolist() for done in await asyncio.gather(*turns)]

    options = {"max_batch": 3, "pages": 24, "prefill_tokens": 8}
    quiet, disturbed = (with_sampler(copied(decoder), lambda s, d=d: write_all(s, d), device, **options) for d in (False, True))  # fmt: skip
    assert quiet == disturbed


def test_thousands_of_short_turns(decoder: Decoder) -> None:
    async def body(sampler: CudaSampler) -> list[Written]:
        async def one(index: int) -> Written:
            done = await write(
                sampler, f"{index}", prompt(5 + index % 7, index % 5), SamplingParams(1 + index % 3), key(index)
            )
            await sampler.release(f"{index}")
            return done

        return await asyncio.gather(*(one(index) for index in range(1000)))

    done = with_sampler(decoder, body, max_batch=64, prefill_tokens=512)
    assert [len(turn.token_ids) for turn in done] == [1 + index % 3 for index in range(1000)]


def test_close_fails_what_is_pending(decoder: Decoder) -> None:
    async def body(sampler: CudaSampler) -> None:
        tasks = [asyncio.create_task(sampler.generate(long_request(i))) for i in range(4)]
        await until(sampler, 5, *tasks)
        await sampler.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError) and "closed" in str(result)

    with_sampler(decoder, body, max_batch=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_bfloat16_on_a_gpu_does_not_depend_on_company_when_invariant(decoder: Decoder) -> None:
    narrow = Decoder(decoder.config, {n: p.detach().to(torch.bfloat16) for n, p in decoder.named_parameters()})

    async def alone(sampler: CudaSampler) -> list[Written]:
        return await turns(sampler, "only", key(), prompt(77))

    async def among_others(sampler: CudaSampler) -> list[Written]:
        others = [asyncio.create_task(turns(sampler, f"o{i}", key(i, "t"), prompt(10 + 9 * i, i))) for i in range(20)]
        await asyncio.sleep(0.01)
        found = await turns(sampler, "only", key(), prompt(77))
        await asyncio.gather(*others)
        return found

    bodies = itertools.product((alone, among_others), (3, 8))
    first, *rest = (with_sampler(narrow, b, "cuda", invariant=True, steps_per_run=n) for b, n in bodies)
    assert all(found == first for found in rest)
    assert all(-20 < logprob <= 0 for turn in first for logprob in turn.logprobs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gets_its_memory_back_in_sleep_and_at_the_end(decoder: Decoder) -> None:
    async def body(sampler: CudaSampler) -> int:
        await crowd(sampler)
        held, before = sampler._batcher.bytes, torch.cuda.memory_allocated()
        await sampler.sleep()
        assert before - torch.cuda.memory_allocated() >= held
        await sampler.wake()
        await turns(sampler, "later", key(), prompt(20))
        return held

    gc.collect()  # what other tests left behind
    before = torch.cuda.memory_allocated()
    held = with_sampler(decoder, body, "cuda", pages=20_000)
    gc.collect()
    assert held > 100 << 20 and torch.cuda.memory_allocated() - before < held // 4


FAMILIES = ["gemma3_text", "gpt_oss", "deepseek_v3"]
"""Windows, sinks, and keys of another size than values."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_write_too(family: str, device: str) -> None:
    model = TransformersModel(architectures.build(family))

    async def body(sampler: InProcessSampler) -> list[list[Written]]:
        starts = [prompt(5 + 9 * i, seed=i) for i in range(4)]
        return await asyncio.gather(*(turns(sampler, f"c{i}", key(i), start) for i, start in enumerate(starts)))

    expected = on_the_cpu(model, body)
    moved = TransformersModel(architectures.build(family)).move(torch.device(device), torch.float32)
    said: list[str] = []
    found = with_sampler(moved, body, device, say=said.append)
    assert close_to(found, expected)
    assert [text for text in said if "CUDA graphs" not in text] == []

"""The torch sampler writes the same tokens whatever else it is doing, and every way a request can end is told."""

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from written import Written, key, letters, prompt, write

from turnwise.engines.model import attention
from turnwise.engines.model.attention import Regime, pad_rows
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.engines.model.token_logprobs import token_logprobs
from turnwise.engines.samplers.cpu import batching
from turnwise.engines.samplers.cpu.threads import REGIMES, find_regime
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.request import NoiseKey, SamplingParams
from turnwise.engines.samplers.sampler import Sampler
from turnwise.errors import EngineError
from turnwise.types import FinishReason

CONTEXT = 512


@functools.cache
def regime_of(decoder: Decoder) -> Regime:
    """The one proven here, else any: most of what a sampler does needs none."""
    return find_regime(decoder) or REGIMES[0]


def with_sampler(decoder: Decoder, body: Callable[[TorchSampler], Awaitable[Any]], **options: Any) -> Any:
    """Run an async body with a sampler that is closed on every path; nothing may hang."""

    async def run() -> Any:
        sampler = TorchSampler(
            decoder, **{"decode": letters, "max_batch": 8, "threads": 1, "regime": regime_of(decoder), **options}
        )
        try:
            return await asyncio.wait_for(body(sampler), 60)
        finally:
            await sampler.close()

    return asyncio.run(run())


async def two_turns(sampler: Sampler, name: str, noise: NoiseKey, start: list[int]) -> tuple[Written, Written]:
    params = SamplingParams(max_tokens=24, temperature=0.9)
    first = await write(sampler, name, start, params, noise)
    second = await write(sampler, name, [*start, *first.token_ids, 5, 6, 7], params, noise)
    return first, second


def alone(decoder: Decoder, noise: NoiseKey, start: list[int], **options: Any) -> tuple[Written, Written]:
    result: tuple[Written, Written] = with_sampler(
        decoder, lambda sampler: two_turns(sampler, "only", noise, start), **options
    )
    return result


def test_company_changes_nothing(decoder: Decoder, regime: Regime) -> None:
    start = prompt(77)
    expected = alone(decoder, key(), start)
    rng = np.random.default_rng(3)

    async def crowd(sampler: TorchSampler) -> tuple[Written, Written]:
        async def other(index: int) -> None:
            await asyncio.sleep(float(rng.uniform(0, 0.15)))
            # Some share a prefix with the one we watch, some everything, some nothing.
            mine = start[: int(rng.integers(0, 78))] + prompt(int(rng.integers(1, 150)), seed=index)
            await two_turns(sampler, f"other {index}", key(index, "t"), mine)
            if index % 3:
                await sampler.release(f"other {index}")

        others = [asyncio.create_task(other(index)) for index in range(40)]
        await asyncio.sleep(0.05)
        watched = await two_turns(sampler, "watched", key(), start)
        await asyncio.gather(*others)
        assert sampler.stats.peak_batch > 4 and sampler.stats.reused_tokens > 0
        return watched

    assert with_sampler(decoder, crowd, max_batch=16) == expected


@pytest.mark.parametrize("options", [{"prefix_budget": 0}, {"session_budget": 0}, {"prefix_budget": 20_000}])
def test_caches_change_nothing(decoder: Decoder, regime: Regime, options: dict[str, int]) -> None:
    start = prompt(150, seed=4)
    expected = alone(decoder, key(), start)

    async def body(sampler: TorchSampler) -> tuple[Written, Written]:
        await two_turns(sampler, "before", key(9), start)
        result = await two_turns(sampler, "again", key(), start)
        reused = sampler.stats.reused_tokens
        assert sampler.cached_bytes == 0 or "session_budget" not in options
        # 4 blocks of the prompt, the cached turn of 173 tokens, or the prompt and all blocks of the second turn.
        assert {"prefix_budget": reused >= 346, "session_budget": reused > 0}[next(iter(options))]
        return result

    assert with_sampler(decoder, body, **options) == expected


def test_a_long_prompt_finds_room_in_the_place_of_a_sibling_that_waits_for_its_prefix(
    decoder: Decoder, regime: Regime
) -> None:
    """Room is made for those that are next; one of them may be passed over, and who comes instead may be longer."""
    short, long = SamplingParams(max_tokens=4), prompt(400, seed=2)
    starts = {"first": prompt(65), "sibling": prompt(65), "long": long}

    async def body(sampler: TorchSampler) -> list[Written]:
        return await asyncio.gather(*(write(sampler, name, ids, short, key()) for name, ids in starts.items()))

    async def by_itself(sampler: TorchSampler) -> Written:
        return await write(sampler, "long", long, short, key())

    assert with_sampler(decoder, body, max_batch=2)[2] == with_sampler(decoder, by_itself)


def test_prefix_is_computed_once_for_siblings(decoder: Decoder) -> None:
    start = prompt(200, seed=5)

    async def body(sampler: TorchSampler) -> None:
        params = SamplingParams(max_tokens=2)
        await asyncio.gather(*(write(sampler, f"c{i}", start, params, key(i)) for i in range(8)))
        assert sampler.stats.prefilled_tokens == 200 + 7 * (200 - 192)
        assert sampler.stats.reused_tokens == 7 * 192

    with_sampler(decoder, body)


def test_long_prompts_are_fed_in_pieces_between_decode_steps(
    decoder: Decoder, regime: Regime, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = prompt(301, seed=6)
    expected = alone(decoder, key(), start)
    monkeypatch.setattr(batching, "PREFILL_TOKENS", 37)

    async def body(sampler: TorchSampler) -> tuple[Written, Written]:
        short = [asyncio.create_task(two_turns(sampler, f"s{i}", key(i, "u"), prompt(9 + i, i))) for i in range(6)]
        long = await two_turns(sampler, "long", key(), start)
        await asyncio.gather(*short)
        return long

    assert with_sampler(decoder, body) == expected


def test_logprobs_equal_a_whole_forward(decoder: Decoder, regime: Regime) -> None:
    start = prompt(60, seed=7)
    first, second = alone(decoder, key(), start)
    sequence = torch.tensor([*start, *first.token_ids, 5, 6, 7, *second.token_ids])
    count = len(sequence)
    with torch.no_grad():
        padded = [pad_rows(x, regime) for x in (sequence, torch.arange(count))]
        hidden = decoder(ModelInputs(*padded), attention.exact([count], regime))
        logprobs = token_logprobs(decoder.logits(hidden)[: count - 1], sequence[1:], 0.9)
    begin, again = len(start) - 1, len(start) + len(first.token_ids) + 2
    assert logprobs[begin : begin + len(first.logprobs)].tolist() == list(first.logprobs)
    assert logprobs[again:].tolist() == list(second.logprobs)


def test_siblings_and_seeds_differ(decoder: Decoder) -> None:
    start = prompt(20)

    async def body(sampler: TorchSampler) -> list[Written]:
        params = SamplingParams(max_tokens=16)
        keys = [key(0), key(1), NoiseKey(1, 1, "s", 0), NoiseKey(0, 2, "s", 0), key(0, "other")]
        return await asyncio.gather(*(write(sampler, str(k), start, params, k) for k in keys))

    for a, b in itertools.combinations(with_sampler(decoder, body), 2):
        assert a.token_ids != b.token_ids


def test_greedy_equals_transformers(decoder: Decoder, tmp_path: Path) -> None:
    decoder.save(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompts = [prompt(40, seed) for seed in range(4)]
    ids = torch.tensor(prompts)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=0)

    async def body(sampler: TorchSampler) -> list[Written]:
        params = SamplingParams(max_tokens=30, temperature=0.0)
        return await asyncio.gather(*(write(sampler, f"{i}", p, params, key(i)) for i, p in enumerate(prompts)))

    assert [list(c.token_ids) for c in with_sampler(decoder, body)] == out[:, 40:].tolist()


def test_samples_follow_the_model(decoder: Decoder) -> None:
    start = prompt(12)
    with torch.no_grad():
        logits = decoder.logits(decoder(ModelInputs(torch.tensor(start), torch.arange(12)), attention.packed([12])))[-1]
    probabilities = torch.softmax(logits.double() / 2.0, -1).numpy()

    async def body(sampler: TorchSampler) -> list[Written]:
        params = SamplingParams(max_tokens=1, temperature=2.0)
        return await asyncio.gather(*(write(sampler, f"{i}", start, params, key(i)) for i in range(2000)))

    counts = np.bincount([c.token_ids[0] for c in with_sampler(decoder, body, max_batch=64)], minlength=96)
    likely = probabilities * 2000 >= 5
    expected = np.append(probabilities[likely], probabilities[~likely].sum()) * 2000
    observed = np.append(counts[likely], counts[~likely].sum())
    freedom = len(expected) - 1
    assert freedom > 5
    # Wilson-Hilferty: the 0.999 quantile of chi-square
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert ((observed - expected) ** 2 / expected).sum() < limit


def test_stop_ids_and_strings_end_a_turn(decoder: Decoder) -> None:
    start = prompt(30, seed=1)

    async def body(sampler: TorchSampler) -> None:
        free = await write(sampler, "free", start, SamplingParams(max_tokens=40), key())
        assert len(free.token_ids) == 40 and free.finish_reason is FinishReason.LENGTH
        stop = free.token_ids[20]
        cut = free.token_ids.index(stop) + 1
        by_id = await write(sampler, "id", start, SamplingParams(40, stop_ids=frozenset({stop})), key())
        assert by_id.token_ids == free.token_ids[:cut] and by_id.logprobs == free.logprobs[:cut]
        assert by_id.finish_reason is FinishReason.STOP
        text = letters(free.token_ids)
        words = ("never\n", text[25:28])
        by_text = await write(sampler, "text", start, SamplingParams(40, stop_strings=words), key())
        assert letters(by_text.token_ids) == text[: text.index(words[1]) + 3]
        assert by_text.finish_reason is FinishReason.STOP

    with_sampler(decoder, body)


def test_stop_strings_are_found_late_in_a_long_turn(decoder: Decoder) -> None:
    start = prompt(10, seed=2)

    async def body(sampler: TorchSampler) -> None:
        free = await write(sampler, "free", start, SamplingParams(max_tokens=400), key())
        text = letters(free.token_ids)
        at = next(i for i in range(330, 390) if text.index(text[i : i + 6]) == i)
        cut = await write(sampler, "cut", start, SamplingParams(400, stop_strings=(text[at : at + 6],)), key())
        assert letters(cut.token_ids) == text[: at + 6]

    with_sampler(decoder, body)


def test_length_limits(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        assert sampler.context_length == CONTEXT
        near = await write(sampler, "near", prompt(CONTEXT - 3), SamplingParams(max_tokens=10), key())
        assert len(near.token_ids) == 3 and near.finish_reason is FinishReason.LENGTH
        for name, length, most in (("full", CONTEXT, 10), ("over", CONTEXT + 9, 10), ("none", 4, 0)):
            empty = await write(sampler, name, prompt(length), SamplingParams(max_tokens=most), key())
            assert empty == Written((), (), FinishReason.LENGTH, 7)
        # A full context does not lose the conversation's past.
        again = [*prompt(CONTEXT - 3), *near.token_ids]
        assert (await write(sampler, "near", again, SamplingParams(5), key())).token_ids == ()

    with_sampler(decoder, body, policy_version=7)


@pytest.mark.parametrize(
    ("ids", "params", "words"),
    [
        ([], SamplingParams(4), "empty"),
        ([1, 96], SamplingParams(4), "96"),
        ([1, -1], SamplingParams(4), "-1"),
        ([1], SamplingParams(-1), "max_tokens"),
        ([1], SamplingParams(4, temperature=float("nan")), "temperature"),
        ([1], SamplingParams(4, top_p=0.0), "top_p"),
        ([1], SamplingParams(4, stop_strings=("",)), "stop string"),
    ],
)
def test_bad_requests_fail_alone(decoder: Decoder, ids: list[int], params: SamplingParams, words: str) -> None:
    async def body(sampler: TorchSampler) -> None:
        good = asyncio.create_task(write(sampler, "good", prompt(5), SamplingParams(5), key()))
        with pytest.raises(EngineError, match=words):
            await write(sampler, "bad", ids, params, key())
        assert len((await good).token_ids) == 5

    with_sampler(decoder, body)


def test_nan_fails_its_request_and_no_other(decoder: Decoder) -> None:
    poisoned = Decoder(decoder.config, {name: p.detach().clone() for name, p in decoder.named_parameters()})
    with torch.no_grad():
        poisoned.embed[95] = torch.inf  # whoever reads token 95 computes NaN
        assert poisoned.head is not None
        poisoned.head[95] = poisoned.head[95] * 0.0  # seldom written, and then seldom read
    start = [i % 95 for i in prompt(40)]

    async def body(sampler: TorchSampler) -> None:
        bad = [write(sampler, f"bad {i}", [*start[:i], 95], SamplingParams(9), key()) for i in (3, 33)]
        results = await asyncio.gather(*bad, two_turns(sampler, "good", key(), start), return_exceptions=True)
        assert all(isinstance(result, EngineError) and "NaN" in str(result) for result in results[:2])
        # Their rows are used again, and must not remember.
        for index in range(3):
            assert await two_turns(sampler, f"after {index}", key(), start) == results[2]

    with_sampler(poisoned, body)


def test_changed_past_is_refused(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        start, params = prompt(30), SamplingParams(max_tokens=6)
        first = await write(sampler, "c", start, params, key())
        changed = [*start, *first.token_ids, 4]
        changed[3] = (changed[3] + 1) % 96
        with pytest.raises(EngineError, match="changed earlier tokens"):
            await write(sampler, "c", changed, params, key())
        with pytest.raises(EngineError, match="changed earlier tokens"):
            await write(sampler, "c", start, params, key())
        assert (await write(sampler, "c", [*start, *first.token_ids, 4], params, key())).token_ids
        await sampler.release("c")
        assert (await write(sampler, "c", changed, params, key())).token_ids

    with_sampler(decoder, body)


def test_one_conversation_writes_one_turn_at_a_time(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        turns = (write(sampler, "c", prompt(30), SamplingParams(9), key()) for _ in range(2))
        results = await asyncio.gather(*turns, return_exceptions=True)
        assert isinstance(results[0], Written)
        assert isinstance(results[1], EngineError) and "still writing" in str(results[1])

    with_sampler(decoder, body)


def test_cached_memory_is_counted_and_released(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        for index in range(4):
            await write(sampler, f"c{index}", prompt(50, index), SamplingParams(10), key())
        # 59 tokens are cached: the last one written was never fed. Two layers, keys and values, two heads of 16.
        assert sampler.cached_bytes == 4 * 59 * (2 * 2 * 2 * 16 * 4)
        for index in range(4):
            await sampler.release(f"c{index}")
        await sampler.release("unknown")
        await write(sampler, "last", prompt(3), SamplingParams(0), key())  # orders are obeyed in turn
        assert sampler.cached_bytes == 0

    with_sampler(decoder, body)


def test_released_while_waiting_or_writing_is_not_kept(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        turns = [write(sampler, f"c{i}", prompt(20, i), SamplingParams(30), key(i)) for i in range(3)]
        tasks = [asyncio.create_task(turn) for turn in turns]
        await asyncio.sleep(0)
        for index in range(3):
            await sampler.release(f"c{index}")
        assert all(len(result.token_ids) == 30 for result in await asyncio.gather(*tasks))
        assert sampler.cached_bytes == 0

    with_sampler(decoder, body, max_batch=1)


def test_bfloat16_writes_too(decoder: Decoder) -> None:
    narrow = Decoder(decoder.config, {n: p.detach().to(torch.bfloat16) for n, p in decoder.named_parameters()})

    async def body(sampler: TorchSampler) -> None:
        turns = (two_turns(sampler, f"c{i}", key(i), prompt(70 + i)) for i in range(3))
        for first, second in await asyncio.gather(*turns):
            assert len(first.token_ids) == len(second.token_ids) == 24
            assert all(-20 < logprob <= 0 for logprob in (*first.logprobs, *second.logprobs))

    with_sampler(narrow, body)


def test_cancelled_requests_free_their_row(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        params = SamplingParams(max_tokens=400)
        tasks = [asyncio.create_task(write(sampler, f"c{i}", prompt(20, i), params, key(i))) for i in range(5)]
        await asyncio.sleep(0.05)
        for task in tasks[:4]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[:4])
        assert isinstance(results[4], Written) and len(results[4].token_ids) == 400
        # The same conversation may begin again, with what it knew before.
        assert len((await write(sampler, "c0", prompt(20), SamplingParams(4), key())).token_ids) == 4
        assert sampler.stats.decoded_tokens < 2000

    with_sampler(decoder, body, max_batch=2)


def test_close_fails_what_is_pending(decoder: Decoder) -> None:
    async def body(sampler: TorchSampler) -> None:
        turns = [write(sampler, f"c{i}", prompt(20, i), SamplingParams(480), key(i)) for i in range(4)]
        tasks = [asyncio.create_task(turn) for turn in turns]
        await asyncio.sleep(0.02)
        await sampler.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError) and "closed" in str(result)
        with pytest.raises(EngineError, match="closed"):
            await write(sampler, "late", prompt(3), SamplingParams(2), key())
        await sampler.release("late")
        await sampler.close()

    with_sampler(decoder, body, max_batch=2)


def test_worker_failure_reaches_everybody(decoder: Decoder) -> None:
    def broken(token_ids: Any) -> str:
        raise ZeroDivisionError("no text today")

    async def body(sampler: TorchSampler) -> None:
        fine = asyncio.create_task(write(sampler, "fine", prompt(9), SamplingParams(500), key()))
        await asyncio.sleep(0.02)
        with pytest.raises(EngineError, match="no text today") as caught:
            await write(sampler, "stops", prompt(9), SamplingParams(9, stop_strings=("x",)), key())
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(EngineError, match="no text today"):
            await fine
        with pytest.raises(EngineError, match="no text today"):
            await write(sampler, "later", prompt(9), SamplingParams(9), key())

    with_sampler(decoder, body, decode=broken)

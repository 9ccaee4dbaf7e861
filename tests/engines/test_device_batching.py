"""Waits, by a clock that is moved by hand, and what the device batcher does when the device has too little memory."""

from typing import Any

import numpy as np
import pytest
import torch
from waits import assert_the_second_waits_for_the_first

from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.fused_decoder import FusedDecoder
from turnwise.engines.samplers.gpu.batching import DeviceBatcher
from turnwise.engines.samplers.gpu.steps import DeviceSteps, Launched
from turnwise.engines.samplers.in_flight import QueuedRequest
from turnwise.engines.samplers.request import SamplingParams
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError
from turnwise.types import Completion

CPU = torch.device("cpu")


class SmallDevice(DeviceSteps):
    """A device that runs out of memory beyond so many pages, rows of a decode run and tokens of a pass."""

    most_pages, most_rows, most_tokens = 1000, 1000, 1000

    def allocate(self, pages: int) -> None:
        _refuse(pages > self.most_pages)
        super().allocate(pages)

    def decode(self, rows: Any, steps: int, longest: int, *, filtered: bool) -> Launched:
        _refuse(len(rows) > self.most_rows)
        return super().decode(rows, steps, longest, filtered=filtered)

    def prefill(self, chunks: Any, *, filtered: bool) -> Launched:
        _refuse(sum(len(chunk.tokens) for chunk in chunks) > self.most_tokens)
        return super().prefill(chunks, filtered=filtered)


def _refuse(refused: bool) -> None:
    if refused:
        raise torch.OutOfMemoryError("no memory left")


def batcher_of(decoder: Decoder, said: list[str], *, slots: int = 8, pages: int = 64, **sizes: int) -> DeviceBatcher:
    model = FusedDecoder.of(decoder, device=CPU, dtype=torch.float32, invariant=False)
    shape = {"slots": slots, "steps": 4, "block": 16, "smallest_pass": 16}
    steps = SmallDevice(model, CPU, **shape, invariant=False, clock=None, say=said.append)
    for name, size in sizes.items():
        setattr(steps, name, size)
    return DeviceBatcher(model, str, steps, slots=slots, pages=pages, prefill_tokens=64, say=said.append)


def request(name: str, tokens: int, length: int = 5) -> QueuedRequest:
    ids = np.random.default_rng(len(name)).integers(96, size=length)
    return QueuedRequest(name, ids, SamplingParams(max_tokens=tokens), 1)


@torch.inference_mode()
def written(batcher: DeviceBatcher) -> dict[str, list[int]]:
    for length in range(1, 7):
        assert batcher.submit(request("c" * length, 10, 9 * length)) is None
    found: dict[str, list[int]] = {}
    while not batcher.idle:
        for queued, result in batcher.step():
            assert isinstance(result, Completion)
            found[queued.conversation] = result.token_ids.tolist()
    return found


def test_trying_every_shape_first_leaves_no_trace(decoder: Decoder) -> None:
    fresh, warm = batcher_of(decoder, []), batcher_of(decoder, [])
    with torch.inference_mode():
        assert warm._steps.warm_up(64) == 2 + 1  # passes of 16 and 64 tokens, and one batch
    assert written(warm) == written(fresh)


def test_a_device_that_runs_out_of_memory_is_given_less_at_a_time(decoder: Decoder) -> None:
    said: list[str] = []
    expected = written(batcher_of(decoder, said))
    assert said == [] and len(expected) == 6
    assert written(batcher_of(decoder, said, most_rows=2, most_tokens=20)) == expected
    assert [text.split(":")[0] for text in said] == [
        "out of memory with 64 tokens of prompts",
        "out of memory with 32 tokens of prompts",
        "out of memory with 5 rows of a decode run",
    ]
    assert all("engine.memory_fraction" in text for text in said)


def test_a_cache_that_does_not_fit_is_halved_until_it_does(decoder: Decoder) -> None:
    said: list[str] = []
    batcher = batcher_of(decoder, said, pages=128, most_pages=40)
    assert [text.split(",")[0] for text in said] == [
        "no room for a cache of 4096 tokens", "no room for a cache of 2048 tokens"
    ]  # fmt: skip
    assert batcher.bytes == 32 * 32 * (2 * 2 * 2 * 16 * 4)
    assert len(written(batcher)) == 6


def test_a_device_without_any_memory_is_named(decoder: Decoder) -> None:
    with pytest.raises(EngineError, match=r"no GPU memory is left for the KV cache: change engine\.memory_fraction"):
        batcher_of(decoder, [], pages=0)
    batcher = batcher_of(decoder, [], most_rows=0)
    with pytest.raises(EngineError, match=r"no memory left for one of the rows of a decode run"):
        written(batcher)


def test_a_request_waits_until_it_has_a_slot(decoder: Decoder, now: list[float]) -> None:
    batcher = batcher_of(decoder, [], slots=1)
    first, second = request("a", 30), request("b", 2)
    assert_the_second_waits_for_the_first(batcher, first, second, now)


def test_new_weights_and_sleep_pause_those_that_write(decoder: Decoder, now: list[float]) -> None:
    batcher = batcher_of(decoder, [], slots=1)
    writes, waits = request("a", 50), request("b", 2)
    batcher.submit(writes)
    batcher.step()
    batcher.submit(waits)
    assert batcher.settle() == []
    weights = list(decoder.weights())

    def slowly() -> Any:
        for weight in weights:
            now[0] += 1.0
            yield weight

    batcher.publish(FullWeights(decoder.weight_shapes(), slowly()), 1)
    passed = now[0]
    assert passed == len(weights) and (batcher.waited(writes), batcher.waited(waits)) == (passed, passed)
    batcher.step()
    now[0] += 5.0
    assert (batcher.waited(writes), batcher.waited(waits)) == (passed, passed + 5.0), "it has its slot again"
    batcher.settle()
    batcher.sleep()
    now[0] += 7.0
    batcher.wake()
    batcher.step()
    now[0] += 20.0
    assert (batcher.waited(writes), batcher.waited(waits)) == (passed + 7.0, passed + 32.0)

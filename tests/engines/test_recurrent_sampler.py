"""Samplers write with models whose layers carry a state: kept between turns, forked for siblings, computed anew."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from architectures import build
from written import letters, prompt

from turnwise.engines.model.attention import Regime, packed, positions
from turnwise.engines.model.policy_model import ModelInputs, state_bytes
from turnwise.engines.model.recurrence import Recurrence
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.gpu.cuda import CudaSampler
from turnwise.engines.samplers.gpu.state_rows import StateRows
from turnwise.engines.samplers.in_process import InProcessSampler
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError
from turnwise.types import Completion

KINDS = ["qwen3_5_text", "lfm2", "mamba2", "falcon_h1"]
PARAMS = SamplingParams(max_tokens=9, temperature=0.9)


SAMPLERS = ["torch", "cuda"]
"""That of the GPU runs here with the references of its kernels."""


def run(kind: str, model: TransformersModel, body: Callable[[InProcessSampler], Awaitable[Any]], **options: Any) -> Any:
    async def inside() -> Any:
        given: dict[str, Any] = {"decode": letters, "max_batch": 4, **options}
        sampler: InProcessSampler
        if kind == "torch":
            sampler = TorchSampler(model, threads=1, regime=Regime(1, 1, 32), **given)
        else:
            given = {"cache_bytes": 1 << 22, "steps_per_run": 5, "prefill_tokens": 64, **given}
            sampler = CudaSampler(model, device=torch.device("cpu"), invariant=False, **given)
        try:
            return await asyncio.wait_for(body(sampler), 60)
        finally:
            await sampler.close()

    return asyncio.run(inside())


def logprobs(model: TransformersModel, ids: list[int], first: int) -> np.ndarray:
    """What a whole pass over a sequence gives its tokens from `first` on."""
    tokens, lengths = torch.tensor(ids), (len(ids),)
    with torch.no_grad():
        hidden = model(ModelInputs(tokens, positions(lengths), recurrence=Recurrence(lengths)), packed(lengths))
        every = torch.log_softmax(model.logits(hidden) / PARAMS.temperature, -1)
    return every[first - 1 : -1].gather(1, tokens[first:, None])[:, 0].numpy()


def holds(model: TransformersModel, ids: list[int], done: Completion) -> bool:
    """Whether the tokens behind `ids` have the log-probs that a whole pass gives them."""
    return np.allclose(done.logprobs, logprobs(model, [*ids, *done.token_ids.tolist()], len(ids)), atol=1e-4)


async def turns(
    sampler: InProcessSampler, name: str, sibling: int, ids: list[int]
) -> list[tuple[list[int], Completion]]:
    """Three turns of a conversation, a few tokens of a tool between them."""
    written = []
    for turn in range(3):
        noise = NoiseKey(0, 0, name, sibling)
        done = await sampler.generate(Request(f"{name}/{sibling}", np.array(ids), PARAMS, noise))
        written.append((list(ids), done))
        ids = [*ids, *done.token_ids.tolist(), *prompt(4 + sibling, seed=turn)]
    return written


@pytest.mark.parametrize("sampler_kind", SAMPLERS)
@pytest.mark.parametrize("kind", KINDS)
def test_siblings_and_turns_have_the_logprobs_of_whole_passes(kind: str, sampler_kind: str) -> None:
    """Siblings go on from the states at the end of what they share, turns from those of the turn before."""
    model = TransformersModel(build(kind))

    async def body(sampler: InProcessSampler) -> list[list[tuple[list[int], Completion]]]:
        conversations = [turns(sampler, "a", n, prompt(41)) for n in range(3)]
        conversations += [turns(sampler, "b", n, prompt(7, seed=5)) for n in range(3)]
        written = await asyncio.gather(*conversations)
        assert sampler.stats.reused_tokens >= 2 * 32 + 6 * 2 * 9, "prompts are shared, turns are kept"
        return written

    for conversation in run(sampler_kind, model, body):
        for ids, done in conversation:
            assert len(done.token_ids) == 9 and holds(model, ids, done)


@pytest.mark.parametrize("sampler_kind", SAMPLERS)
@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2"])
def test_states_are_computed_anew_after_an_update_and_after_sleep(kind: str, sampler_kind: str) -> None:
    model, other = TransformersModel(build(kind)), TransformersModel(build(kind, seed=7))
    shapes, ids = model.weight_shapes(), prompt(50)
    long = SamplingParams(max_tokens=60, temperature=PARAMS.temperature)
    weights = {name: tensor.clone() for name, tensor in model.weights()}

    async def body(sampler: InProcessSampler) -> Completion:
        turn = asyncio.create_task(sampler.generate(Request("c", np.array(ids), long, NoiseKey(0, 0, "c", 0))))
        for order in (20, 40):
            while sampler.stats.decoded_tokens < order:
                await asyncio.sleep(0)
            if order == 20:
                await sampler.publish(FullWeights(shapes, iter(other.weights())), 1)
            else:
                await sampler.sleep()
                await sampler.wake()
        return await turn

    done = run(sampler_kind, model, body)
    (_, old), (version, new) = ((each.version, each.tokens) for each in done.versions)
    assert version == 1 and old + new == 60
    whole = [*ids, *done.token_ids.tolist()]
    assert np.allclose(done.logprobs[old:], logprobs(other, whole, len(ids))[old:], atol=1e-4)
    model.load(weights.items())
    assert np.allclose(done.logprobs[:old], logprobs(model, whole, len(ids))[:old], atol=1e-4)


@pytest.mark.parametrize("sampler_kind", SAMPLERS)
def test_a_prompt_in_many_pieces_and_a_cancelled_turn_leave_others_alone(
    sampler_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that another sequence had begins from nothing, and a prompt is fed in steps of 16 tokens."""
    monkeypatch.setattr("turnwise.engines.samplers.cpu.batching.PREFILL_TOKENS", 16)
    model = TransformersModel(build("qwen3_5_text"))

    async def body(sampler: InProcessSampler) -> list[list[tuple[list[int], Completion]]]:
        long = SamplingParams(max_tokens=60, temperature=0.9)
        lost = asyncio.create_task(
            sampler.generate(Request("lost", np.array(prompt(30, seed=9)), long, NoiseKey(0, 0, "l", 0)))
        )
        while sampler.stats.decoded_tokens < 3:
            await asyncio.sleep(0)
        lost.cancel()
        return await asyncio.gather(*(turns(sampler, "a", n, prompt(45)) for n in range(6)))

    options = {"prefill_tokens": 16} if sampler_kind == "cuda" else {}
    for conversation in run(sampler_kind, model, body, max_batch=3, **options):
        assert all(holds(model, ids, done) for ids, done in conversation)


def test_states_that_were_given_up_or_are_ahead_of_a_cut_turn_are_computed_anew() -> None:
    """Two rows for all that is kept, and turns that the host cuts where the device has written on."""
    model = TransformersModel(build("qwen3_5_text"))
    each = state_bytes(model.shape.states)
    cut = SamplingParams(max_tokens=9, temperature=0.9, stop_strings=tuple(letters([n]) for n in range(0, 96, 7)))

    async def one(sampler: InProcessSampler, number: int) -> list[tuple[list[int], Completion]]:
        ids, written = prompt(40, seed=number % 2), []
        for turn in range(3):
            noise = NoiseKey(0, 0, "a", number)
            done = await sampler.generate(Request(f"c{number}", np.array(ids), cut, noise))
            written.append((list(ids), done))
            ids = [*ids, *done.token_ids.tolist(), *prompt(5, seed=turn)]
        return written

    async def body(sampler: InProcessSampler) -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(*(one(sampler, number) for number in range(7)))

    written = run("cuda", model, body, max_batch=3, cache_bytes=2 * (3 + 2 + 2) * each + (1 << 18))
    assert any(len(done.token_ids) < 9 for conversation in written for _, done in conversation)
    for conversation in written:
        assert all(holds(model, ids, done) for ids, done in conversation)


def test_a_cache_that_has_no_room_for_states_is_refused() -> None:
    model = TransformersModel(build("qwen3_5_text"))
    with pytest.raises(EngineError, match="the states of recurrent layers take 0.0 MiB for each of 4 turns"):
        run("cuda", model, asyncio.sleep, cache_bytes=1 << 10)


def test_moves_of_states_give_what_moving_one_by_one_gives() -> None:
    """Random conversations over few rows: what a slot holds is what its sequence was fed."""
    draw, rows = np.random.default_rng(0), StateRows(3, 4)
    device, truth = np.arange(rows.rows), {}
    device[rows.zeros] = 0
    slots: dict[int, int] = {}
    for step in range(3000):
        slot, name = int(draw.integers(3)), f"c{draw.integers(6)}"
        if slot in slots and draw.random() < 0.5:
            rows.keep(name, slot)
            truth[name] = slots.pop(slot)
        elif rows.has(name) and draw.random() < 0.8:
            slots[slot] = truth[name]
            (rows.resume if draw.random() < 0.5 else rows.fork)(name, slot)
        else:
            rows.begin(slot)
            slots[slot] = 0
        if draw.random() < 0.3:
            for sources, targets in rows.take_moves():
                device[targets] = device[sources]
            assert all(device[slot] == value for slot, value in slots.items())
            for slot in slots:  # each is fed something
                slots[slot] = device[slot] = 100 + 3 * step + slot
    assert device[rows.zeros] == 0

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
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.engines.model.recurrence import Recurrence
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.weight_updates import FullWeights
from turnwise.types import Completion

KINDS = ["qwen3_5_text", "lfm2", "mamba2", "falcon_h1"]
PARAMS = SamplingParams(max_tokens=9, temperature=0.9)


def run(model: TransformersModel, body: Callable[[TorchSampler], Awaitable[Any]], **options: Any) -> Any:
    async def inside() -> Any:
        given = {"decode": letters, "max_batch": 4, "threads": 1, "regime": Regime(1, 1, 32), **options}
        sampler = TorchSampler(model, **given)
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


async def turns(sampler: TorchSampler, name: str, sibling: int, ids: list[int]) -> list[tuple[list[int], Completion]]:
    """Three turns of a conversation, a few tokens of a tool between them."""
    written = []
    for turn in range(3):
        noise = NoiseKey(0, 0, name, sibling)
        done = await sampler.generate(Request(f"{name}/{sibling}", np.array(ids), PARAMS, noise))
        written.append((list(ids), done))
        ids = [*ids, *done.token_ids.tolist(), *prompt(4 + sibling, seed=turn)]
    return written


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_and_turns_have_the_logprobs_of_whole_passes(kind: str) -> None:
    """Siblings go on from the states at the end of what they share, turns from those of the turn before."""
    model = TransformersModel(build(kind))

    async def body(sampler: TorchSampler) -> list[list[tuple[list[int], Completion]]]:
        conversations = [turns(sampler, "a", n, prompt(41)) for n in range(3)]
        conversations += [turns(sampler, "b", n, prompt(7, seed=5)) for n in range(3)]
        written = await asyncio.gather(*conversations)
        assert sampler.stats.reused_tokens >= 2 * 32 + 6 * 2 * 9, "prompts are shared, turns are kept"
        return written

    for conversation in run(model, body):
        for ids, done in conversation:
            assert len(done.token_ids) == 9 and holds(model, ids, done)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2"])
def test_states_are_computed_anew_after_an_update_and_after_sleep(kind: str) -> None:
    model, other = TransformersModel(build(kind)), TransformersModel(build(kind, seed=7))
    shapes, ids = model.weight_shapes(), prompt(50)
    long = SamplingParams(max_tokens=60, temperature=PARAMS.temperature)
    weights = {name: tensor.clone() for name, tensor in model.weights()}

    async def body(sampler: TorchSampler) -> Completion:
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

    done = run(model, body)
    (_, old), (version, new) = ((each.version, each.tokens) for each in done.versions)
    assert version == 1 and old + new == 60
    whole = [*ids, *done.token_ids.tolist()]
    assert np.allclose(done.logprobs[old:], logprobs(other, whole, len(ids))[old:], atol=1e-4)
    model.load(weights.items())
    assert np.allclose(done.logprobs[:old], logprobs(model, whole, len(ids))[:old], atol=1e-4)


def test_a_prompt_in_many_pieces_and_a_cancelled_turn_leave_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that another sequence had begins from nothing, and a prompt is fed in steps of 16 tokens."""
    monkeypatch.setattr("turnwise.engines.samplers.cpu.batching.PREFILL_TOKENS", 16)
    model = TransformersModel(build("qwen3_5_text"))

    async def body(sampler: TorchSampler) -> list[list[tuple[list[int], Completion]]]:
        long = SamplingParams(max_tokens=60, temperature=0.9)
        lost = asyncio.create_task(
            sampler.generate(Request("lost", np.array(prompt(30, seed=9)), long, NoiseKey(0, 0, "l", 0)))
        )
        while sampler.stats.decoded_tokens < 3:
            await asyncio.sleep(0)
        lost.cancel()
        return await asyncio.gather(*(turns(sampler, "a", n, prompt(45)) for n in range(6)))

    for conversation in run(model, body, max_batch=3):
        assert all(holds(model, ids, done) for ids, done in conversation)

"""Engines are opened in one place: two models on the same weights, exact only where that is proven, always closed."""

import asyncio
import threading
from typing import Any

import pytest
import torch

from turnwise import configure
from turnwise.assemble import make_renderer, prepare, token_context
from turnwise.engines import opening
from turnwise.engines.opening import LearnerParts, OpenEngines, open_engines, open_sampler
from turnwise.engines.samplers.request import NoiseKey
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.updates import Adapter, FullWeights
from turnwise.errors import ConfigError

SMALL = ("task=arithmetic", "engine.threads=1", "rollout.tools=[]", "rollout.interaction=null", "board=false")

ONE_UPDATE = LearnerParts(1)


def workers() -> int:
    return sum(thread.name == "turnwise-sampler" for thread in threading.enumerate())


def opened(*overrides: str, body: Any, parts: LearnerParts = ONE_UPDATE) -> list[str]:
    """What was said while engines were open."""
    config, said = configure(*SMALL, *overrides), list[str]()

    async def run() -> None:
        async with open_engines(config, make_renderer(config), parts, said.append) as engines:
            assert workers() == 1
            await body(engines)

    before = torch.get_num_threads()
    try:
        asyncio.run(run())
    finally:
        torch.set_num_threads(before)
        assert workers() == 0, "closed on every path"
    return said


async def same_weights(engines: OpenEngines) -> None:
    sampler: Any = engines.sampler
    mine, theirs = dict(sampler._batcher._model.weights()), dict(engines.learner.model.weights())
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor.float(), theirs[name].to(tensor.dtype).float())
        assert tensor.data_ptr() != theirs[name].data_ptr()


def test_sampler_and_learner_have_a_model_each() -> None:
    found: list[OpenEngines] = []

    async def body(engines: OpenEngines) -> None:
        await same_weights(engines)
        found.append(engines)
        await engines.sampler.publish(engines.learner.weights(), 3)

    said = opened(body=body, parts=LearnerParts(5, critic=True, reference=True))
    assert found[0].exact == ("proven bit by bit" in said[0]) and found[0].threads == 1
    assert found[0].learner.critic is not None and said[1].startswith("torch engine: log-probs as a learner")
    assert "takes FullWeights, reads text only" in said[1]


@pytest.mark.parametrize(
    ("overrides", "promise"),
    [
        (("model.precision=bfloat16",), ""),
        (("model.implementation=transformers", "learner.lora_rank=2"), "proven for the native implementation only"),
    ],
)
def test_only_what_is_proven_is_compared_to_the_last_bit(overrides: tuple[str, ...], promise: str) -> None:
    async def body(engines: OpenEngines) -> None:
        await same_weights(engines)
        assert not engines.exact and engines.learner.model.has_adapter == ("learner.lora_rank=2" in overrides)

    assert promise in opened(*overrides, body=body)[0]


def test_a_failure_after_the_sampler_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(engines: OpenEngines) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opened(body=fail)

    def broken(*args: Any, **kwargs: Any) -> None:
        assert workers() == 1
        raise MemoryError

    monkeypatch.setattr(opening, "open_learner", broken)
    with pytest.raises(MemoryError):
        opened(body=fail)
    for capabilities, words in (
        (Capabilities(Logprobs.NONE, frozenset({FullWeights})), "training needs log-probs"),
        (Capabilities(Logprobs.SCALED, frozenset({Adapter})), "engine=mine.py:X takes Adapter"),
    ):
        with pytest.raises(ConfigError, match=words):
            opening._check_trainable("mine.py:X", capabilities)


def test_lost_turns_are_asked_for_as_often_as_the_config_says() -> None:
    config = configure(*SMALL, "engine.name=scripted", "engine.script=[x]")
    config.engine.retries = 7
    prepared = prepare(config, "test", limit=1)
    renderer = make_renderer(config)
    sampler = open_sampler(config, renderer, lambda text: None).sampler
    backend: Any = token_context(prepared, renderer, sampler, config.sampling).make_backend(
        "c", NoiseKey(0, 0, "s", 0), []
    )
    assert backend.retry.retries == 7

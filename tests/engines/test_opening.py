"""Engines are opened in one place: two models on the same weights, exact only where that is proven, always closed."""

import asyncio
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import build

from turnwise import configure
from turnwise.config.choices import Precision
from turnwise.engines import open_in_process
from turnwise.engines.devices import Gpu, VisibleGpus, choose
from turnwise.engines.memory_plan import Training, memory_here
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.fused_decoder import FusedDecoder
from turnwise.engines.model.routing import RouterShape
from turnwise.engines.model.sources import find_model
from turnwise.engines.open_configured import open_pair, open_sampler
from turnwise.engines.opener import LearnerParts, OpenPair, model_source
from turnwise.engines.publish_weights import check_replay, check_trainable
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import Adapter, FullWeights
from turnwise.errors import ConfigError
from turnwise.rollout.prepare import prepare, token_context

SMALL = ("task=arithmetic", "engine.threads=1", "rollout.tools=[]", "rollout.interaction=null", "board.live=false")

ONE_UPDATE = LearnerParts(1)


def workers() -> int:
    return sum(thread.name == "turnwise-sampler" for thread in threading.enumerate())


def opened(*overrides: str, body: Any, parts: LearnerParts = ONE_UPDATE) -> list[str]:
    """What was said while engines were open."""
    config, said = configure(*SMALL, *overrides), list[str]()

    async def run() -> None:
        async with open_pair(config, make_renderer(config), parts, said.append) as engines:
            assert workers() == 1
            await body(engines)

    before = torch.get_num_threads()
    try:
        asyncio.run(run())
    finally:
        torch.set_num_threads(before)
        assert workers() == 0, "closed on every path"
    return said


async def same_weights(engines: OpenPair) -> None:
    sampler: Any = engines.sampler
    mine, theirs = dict(sampler._batcher._model.weights()), dict(engines.learner.model.weights())
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor.float(), theirs[name].to(tensor.dtype).float())
        assert tensor.data_ptr() != theirs[name].data_ptr()


def test_sampler_and_learner_have_a_model_each() -> None:
    found: list[OpenPair] = []

    async def body(engines: OpenPair) -> None:
        await same_weights(engines)
        found.append(engines)
        await engines.sampler.publish(engines.learner.weights(), 3)

    said = opened(body=body, parts=LearnerParts(5, critic=True, reference=True))
    assert found[0].exact == ("proven bit by bit" in said[0]) and found[0].threads == 1
    assert found[0].learner.critic is not None and said[1].startswith("torch engine: log-probs as the learner")
    assert "takes all weights, reads text only" in said[1]


@pytest.mark.parametrize(
    ("overrides", "promise"),
    [
        (("model.precision=bfloat16",), ""),
        (("model.implementation=transformers", "learner.lora_rank=2"), "proven for the native implementation only"),
    ],
)
def test_only_what_is_proven_is_compared_to_the_last_bit(overrides: tuple[str, ...], promise: str) -> None:
    async def body(engines: OpenPair) -> None:
        await same_weights(engines)
        assert not engines.exact and engines.learner.model.has_adapter == ("learner.lora_rank=2" in overrides)

    assert promise in opened(*overrides, body=body)[0]


def test_a_failure_after_the_sampler_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(engines: OpenPair) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opened(body=fail)

    def broken(*args: Any, **kwargs: Any) -> None:
        assert workers() == 1
        raise MemoryError

    monkeypatch.setattr(open_in_process, "open_learner", broken)
    with pytest.raises(MemoryError):
        opened(body=fail)
    for capabilities, words in (
        (Capabilities(Logprobs.NONE, frozenset({FullWeights})), "training needs log-probs"),
        (Capabilities(Logprobs.SCALED, frozenset({Adapter})), "engine=mine.py:X takes: Adapter"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_trainable("mine.py:X", capabilities, lora=False)


def test_experts_are_replayed_where_both_sides_follow_their_routers(tmp_path: Path) -> None:
    build("qwen3_moe", vocab_size=768, max_position_embeddings=2048).save_pretrained(tmp_path)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_model("tiny").folder / name, tmp_path / name)
    replay = f"model.path={tmp_path}", "learner.routing_replay=true"

    async def body(engines: OpenPair) -> None:
        learner: Any = engines.learner
        assert learner.model.shape.routers == (RouterShape(4, 2),) and engines.sampler.capabilities.routes
        done = await engines.sampler.generate(Request("c", np.arange(5, 9), SamplingParams(6), NoiseKey(0, 0, "c", 0)))
        assert done.experts is not None and done.experts.shape == (4 + 6 - 1, 1, 2)

    for settings in (("learner.lora_rank=2",), ("model.precision=bfloat16",)):
        opened(*replay, *settings, body=body)
    for setting in ("learner.routing_replay=true", "learner.router_loss=0.1"):
        with pytest.raises(ConfigError, match=r"needs learner\.processes=1"):
            configure(*SMALL, setting, "learner.processes=2")
    with pytest.raises(ConfigError, match=r"needs learner\.place=here"):
        configure(*SMALL, "learner.routing_replay=true", "learner.place=process")
    with pytest.raises(ConfigError, match="engine=auto does not say here which experts it chose"):
        check_replay(configure(*SMALL, "learner.routing_replay=true"), routes=False)


def test_lost_turns_are_asked_for_as_often_as_the_config_says() -> None:
    config = configure(*SMALL, "engine.name=scripted", "engine.script=[x]")
    config.engine.retries = 7
    prepared = prepare(config, "test", limit=1)
    renderer = make_renderer(config)
    sampler = asyncio.run(open_sampler(config, renderer, lambda text: None)).sampler
    backend: Any = token_context(prepared, renderer, sampler, config.sampling).make_backend(
        "c", NoiseKey(0, 0, "s", 0), []
    )
    assert backend.retry.retries == 7


@pytest.mark.parametrize("precision", list(Precision))
def test_the_engines_of_a_gpu_are_opened_side_by_side(precision: Precision) -> None:
    """With the kernels' references on the CPU: what is opened, planned and published is what a GPU gets."""
    config = configure(
        *SMALL, "engine.max_batch=4", f"model.precision={precision.value}", "learner.device=cpu",
        f"engine.batch_invariant={str(precision is Precision.bfloat16).lower()}",
    )  # fmt: skip
    seen, said = VisibleGpus((Gpu("a GPU", 80 * 2**30),)), list[str]()
    memory = memory_here(config, Training(), visible=seen)
    chosen = replace(choose(config, seen), device="cpu")
    assert memory is not None and memory.cache > 0
    memory, renderer, before = replace(memory, cache=1 << 22), make_renderer(config), torch.get_num_threads()

    async def body() -> None:
        engines = open_in_process.open_on_gpu(config, chosen, renderer, ONE_UPDATE, said.append, memory)
        try:
            assert engines.clock is not None and not engines.exact and not engines.take_turns
            await same_weights(engines)
            with torch.no_grad():
                next(iter(engines.learner.model.parameters())).mul_(0.5)
            await engines.sampler.publish(engines.learner.weights(), 1)
            await same_weights(engines)
            ids, params = renderer.tokenizer.encode("2 + 2 =").ids, SamplingParams(max_tokens=3)
            written = await engines.sampler.generate(Request("a", np.array(ids), params, NoiseKey(0, 0, "a", 0)))
            assert len(written.token_ids) == 3 and written.policy_version == 1
        finally:
            await engines.sampler.close()

    try:
        asyncio.run(body())
    finally:
        torch.set_num_threads(before)
    assert said[0].startswith(f"cuda engine: {precision.value}, at most 4 sequences at once")
    # Their precisions differ, which batch-invariant kernels cannot mend: whoever asked for them is told.
    assert any("agree to rounding only" in text for text in said) is (precision is Precision.bfloat16)


def test_on_a_gpu_a_sampler_that_rests_shares_the_learner_s_weights() -> None:
    config = configure(*SMALL, "learner.device=cpu")
    chosen = replace(choose(config, VisibleGpus((Gpu("a GPU", 80 * 2**30),))), device="cpu")
    plain = Decoder.read(model_source(config).folder)
    trained = FusedDecoder.of(plain, device=torch.device("cpu"), dtype=torch.bfloat16)

    def places(made: Any) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in made.tensors().items()}

    def writer(*overrides: str) -> Any:
        return open_in_process._writer(configure(*SMALL, *overrides), chosen, trained, share=True)

    assert places(writer("training.max_lag=0")) == places(trained)
    assert not set(places(writer("training.max_lag=1")).values()) & set(places(trained).values())

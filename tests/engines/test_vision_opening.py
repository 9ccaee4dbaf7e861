"""From a folder of a model that sees to engines that look: what the plan says, and what is not borne out is told."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from seeing import png
from tiny_vision_recipe import fresh_model, write_folder
from vision_families import UNFIT, build, write

from turnwise import Config, configure
from turnwise.config.choices import Precision
from turnwise.engines.model.vision_model import VisionModel
from turnwise.engines.open_configured import open_sampler
from turnwise.engines.open_in_process import open_learner
from turnwise.engines.opener import LearnerParts, check_vision, read_policy
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.errors import DataError, EngineError, TemplateError
from turnwise.ledger import MediaSpan
from turnwise.reports.plan import _images
from turnwise.rollout.prepare import measured_images
from turnwise.types import Image, Message, Role, Sample, Text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sees")
    tokenizer = write_folder(made)
    with torch.random.fork_rng():
        fresh_model(len(tokenizer), tokenizer.get_vocab(), seed=0).save_pretrained(made)
    return made


def config_of(folder: Path, *more: str) -> Config:
    return configure(f"model.path={folder}", "engine=torch", "engine.threads=1", "learner.device=cpu", *more)


def test_a_sampler_is_opened_that_looks(folder: Path) -> None:
    config = config_of(folder)
    renderer = make_renderer(config)
    assert renderer.images is not None
    said: list[str] = []

    async def work() -> None:
        opened = await open_sampler(config, renderer, said.append)
        try:
            assert opened.sampler.capabilities.media and any("reads text and images" in line for line in said)
            assert renderer.images is not None
            media = renderer.images.prepare(png(3, 40, 30))
            ids = np.concatenate(([5, 6, 7], media.token_ids, [8]))
            params, key = SamplingParams(max_tokens=4), NoiseKey(0, 0, "a", 0)
            answer = await opened.sampler.generate(Request("a", ids, params, key, (MediaSpan(media, 3),)))
            assert len(answer.token_ids) == 4 and np.isfinite(answer.logprobs).all()
        finally:
            await opened.sampler.close()

    asyncio.run(work())


def test_a_picture_that_the_model_cannot_take_is_found_when_it_is_opened(folder: Path) -> None:
    config = config_of(folder)
    renderer, model = make_renderer(config), read_policy(config, Precision.float32)
    assert isinstance(model, VisionModel)
    check_vision(model, renderer, pytest.fail)
    assert model.reads_images and model.encoded_images == 1
    with torch.no_grad():  # a decoder that does more with an image than we do, as some families have
        text = type(model.model.base_model.language_model)
        own = text.forward

        def forward(self: object, *given: object, **named: object) -> object:
            found = own(self, *given, **named)
            if named.get("visual_pos_masks") is not None and self.config._attn_implementation == "eager":  # type: ignore[attr-defined]
                found.last_hidden_state = found.last_hidden_state * 2 + 1
            return found

        other = read_policy(config, Precision.float32)
        other.model.base_model.language_model.forward = forward.__get__(other.model.base_model.language_model)
    said: list[str] = []
    check_vision(other, renderer, said.append)
    assert not other.reads_images and len(said) == 1 and "reads text only" in said[0]
    assert renderer.text_only is not None and renderer.text_only in said[0]


def test_a_family_whose_images_do_not_fit_reads_text_and_the_plan_says_why(tmp_path: Path) -> None:
    folder = write(UNFIT["gemma3"], tmp_path)
    build(UNFIT["gemma3"]).save_pretrained(folder)
    config = config_of(folder)
    renderer = make_renderer(config)
    why = "could merge with the text beside them"
    assert renderer.images is None and renderer.text_only is not None and why in renderer.text_only
    (line,) = _images(config, renderer)
    assert line.startswith("warning      the model reads text only: ") and line.endswith(why)
    picture = Message(Role.USER, (Text("what?"), Image("data:,")))
    with pytest.raises(DataError, match=f"sample a has images, and .* reads text only: .*{why}"):
        measured_images(Sample("a", (picture,), "test", ""), config, renderer)
    with pytest.raises(TemplateError, match=f"the model reads text only: .*{why}"):
        renderer.prompt([picture], ())

    async def work() -> None:
        opened = await open_sampler(config, renderer, str)
        try:
            assert not opened.sampler.capabilities.media
            params, key = SamplingParams(max_tokens=4), NoiseKey(0, 0, "a", 0)
            ids = np.array(renderer.open([Message(Role.USER, "hello")], ()))
            assert len((await opened.sampler.generate(Request("a", ids, params, key))).token_ids) > 0
        finally:
            await opened.sampler.close()

    asyncio.run(work())


def test_the_tower_is_trained_when_the_config_says_so(folder: Path) -> None:
    config = config_of(folder, "learner.train_vision=true")
    learner = open_learner(config, make_renderer(config), LearnerParts(1, critic=True))
    assert all(parameter.requires_grad for parameter in learner.model.parameters())
    frozen = open_learner(config_of(folder), make_renderer(config), LearnerParts(1, critic=True))
    assert isinstance(frozen.model, VisionModel) and frozen.critic is not None
    for model in (frozen.model, frozen.critic.trunk):
        assert isinstance(model, VisionModel)
        assert not any(parameter.requires_grad for _, parameter in model.vision_parameters())
    text = configure("engine=torch", "learner.device=cpu", "learner.train_vision=true")
    with pytest.raises(EngineError, match=r"learner.train_vision=true: \w+ reads text only"):
        open_learner(text, make_renderer(text), LearnerParts(1))
    both = replace(config.learner, lora_rank=4)
    with pytest.raises(EngineError, match="learner.train_vision=false"):
        open_learner(replace(config, learner=both), make_renderer(config), LearnerParts(1))

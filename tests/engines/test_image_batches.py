"""Images go through a tower together only where each keeps the features that it has alone."""

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from seeing import KINDS, build, prepared

from turnwise.engines.model.image_batches import MOST_VALUES, ImageBatches
from turnwise.engines.model.policy_model import Features
from turnwise.engines.model.vision_model import VisionModel
from turnwise.errors import EngineError
from turnwise.ledger import Media

SIZES = [(16, 16)] * 5 + [(32, 16)] * 2 + [(16, 16)]


def images(kind: str, seed: int) -> list[Media]:
    return [prepared(kind, 1000 * seed + number, *size) for number, size in enumerate(SIZES)]


@pytest.mark.parametrize("kind", KINDS)
def test_images_that_go_together_have_the_features_they_have_alone(kind: str):
    together, alone = VisionModel(build(kind)), VisionModel(build(kind))
    together.together, calls = True, []
    for seed in (1, 2):
        before, media = together.tower_calls, images(kind, seed)
        for found, image in zip(together.encode_images(media), media, strict=True):
            (expected,) = alone.encode_images([image])
            for ours, theirs in zip((found.rows, *found.deep), (expected.rows, *expected.deep), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        calls.append(together.tower_calls - before)
    assert together.encoded_images == alone.encoded_images == 2 * len(SIZES)
    assert alone.tower_calls == 2 * len(SIZES) + 1, "on the CPU one by one, and one was held against the model's code"
    shapes = {tuple(array.shape[1:] for array in image.arrays.values()) for image in media}
    assert calls == [len(SIZES) + len(shapes) + 1, len(shapes)], "those that can be joined; tried once, then known"
    assert copy.deepcopy(together)._batches is together._batches


def image_of(number: int, size: int = 32) -> Media:
    ids = np.zeros(1, np.int64)
    return Media(f"{number}/{size}", b"", ids, ids == 0, {"pixel_values": np.full((1, size), float(number))})


def test_a_tower_that_mixes_images_or_takes_one_only_gets_them_one_at_a_time():
    def mixing(media: Sequence[Media]) -> list[Features]:
        mean = np.mean([image.arrays["pixel_values"] for image in media])
        return [Features(torch.full((1, 3), float(mean))) for _ in media]

    def single(media: Sequence[Media]) -> list[Features]:
        if len(media) > 1:
            raise EngineError("one at a time")
        return mixing(media)

    for tower in (mixing, single):
        batches = ImageBatches()
        for start in (1, 11):
            media = [image_of(start + number) for number in range(7)]
            encoded = batches.encode(media, tower)
            found = {image.digest: float(features.rows[0, 0]) for image, features in encoded}
            assert found == {f"{number}/32": float(number) for number in range(start, start + 7)}


def test_few_large_images_go_together_and_many_small_ones():
    seen: list[int] = []

    def tower(media: Sequence[Media]) -> list[Features]:
        seen.append(len(media))
        return [Features(torch.from_numpy(image.arrays["pixel_values"][:, :1])) for image in media]

    batches = ImageBatches()
    for number, size, count in ((1, MOST_VALUES // 3 + 1, 3), (2, 32, 70), (3, 32, 70)):
        seen.clear()
        media = [image_of(each, size) for each in range(count)]
        assert len([*batches.encode(media, tower)]) == count
        assert number != 1 or seen == [1, 1, 2, 1], "three are one too many, so two are tried, and one goes alone"
    assert seen == [64, 6]


def test_a_trained_tower_has_the_gradient_of_images_one_by_one():
    kind = "qwen3_vl"
    gradients = []
    for one_by_one in (False, True):
        model, media = VisionModel(build(kind)), images(kind, 4)
        model.train_vision(True)
        model.together = True
        for _ in range(2):  # the first pass tries, the second knows
            model.zero_grad()
            features = [model.encode_images([each])[0] for each in media] if one_by_one else model.encode_images(media)
            sum((each.rows**2).sum() for each in features).backward()  # type: ignore[union-attr]
        gradients.append({name: p.grad for name, p in model.vision_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))

"""Scripted traces of `tinylook` to learn from before RL, and scripted policies to measure with.

`script(seed)` writes them episode by episode with real tools (`sft.script`, or `engine=scripted`), `demonstrations`
gives the same conversations at once, for a model that is taught outside of a run.
"""

import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.ext.tinylook.canvas import Box, Pixels, Sizes
from turnwise.ext.tinylook.language import Puzzle, answer_text, call_text
from turnwise.ext.tinylook.rows import png_url, row_of
from turnwise.ext.tinylook.scenes import PRIOR_DIGIT, Knobs, Scene, scene_at
from turnwise.ext.tinylook.solvers import Glance, answer_from, guess, oracle_glances, random_glance

if TYPE_CHECKING:
    from turnwise.engines.samplers.scripted import Script, ScriptRequest

MISSED = 0.2
"""Share of traces with looks that first look past the target, and then at it."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation: what the row asks, each look with the image that came back (a data URL), and the answer."""

    row: dict[str, Any]
    looks: tuple[tuple[str, str], ...]
    answer: str


def demonstrations(
    seed: int, count: int, *, split: str = "train", knobs: Knobs | None = None
) -> Iterator[Demonstration]:
    """Traces of the first `count` scenes: a fifth needs no look, and a fifth of the others errs once (by default)."""
    knobs = knobs or Knobs()
    for index in range(count):
        scene = scene_at(split, seed, index, knobs)
        rng = random.Random(f"trace/{seed}/{split}/{index}")
        looks = tuple(
            (_written(glance), png_url(glance.at(scene.pixels, knobs.sizes.view)))
            for glance in taught_glances(scene, rng, knobs.sizes)
        )
        yield Demonstration(row_of(scene, split, seed, index, knobs.sizes), looks, answer_text(scene.answer))


def taught_glances(scene: Scene, rng: random.Random, sizes: Sizes) -> list[Glance]:
    """The looks of a trace: those of somebody who knows, now and then after one that misses."""
    right = oracle_glances(scene, sizes)
    if not right or rng.random() >= MISSED:
        return right
    while True:
        missed = random_glance(rng, sizes)
        box = (
            missed.box[0] * sizes.step,
            missed.box[1] * sizes.step,
            missed.box[2] * sizes.step,
            missed.box[3] * sizes.step,
        )
        if not any(_meet(box, target) for target in scene.targets):
            return [missed, *right]


def script(seed: int) -> "Script":
    """A Script for samples of this task with its default knobs."""

    def say(request: "ScriptRequest") -> str:
        scene, rng = _scene_of(request, seed)
        glances = taught_glances(scene, rng, Sizes())
        if request.turn < len(glances):
            return _written(glances[request.turn])
        return answer_text(scene.answer)

    return say


def looker(seed: int) -> "Script":
    """A Script that looks where the evidence is and answers by what it was shown; it guesses where nothing is read."""

    def say(request: "ScriptRequest") -> str:
        scene, rng = _scene_of(request, seed)
        return looker_says(scene, request.turn, request.images, rng)

    return say


def guesser(seed: int) -> "Script":
    """A Script that looks as well, and then answers without a thought for what it was shown."""

    def say(request: "ScriptRequest") -> str:
        scene, rng = _scene_of(request, seed)
        return guesser_says(scene, request.turn, rng)

    return say


def looker_says(scene: Scene, turn: int, images: Sequence[bytes], rng: random.Random) -> str:
    """The words of somebody who has been shown these images, the view first; what stands in them decides."""
    sizes = Sizes()
    glances = oracle_glances(scene, sizes)
    if turn < len(glances):
        return _written(glances[turn])
    view, *looks = [_pixels(image) for image in images]
    return answer_text(answer_from(scene, view, glances, looks, sizes) or guess(scene, rng))


def guesser_says(scene: Scene, turn: int, rng: random.Random) -> str:
    """The words of somebody who knows how often each answer is right, and nothing else."""
    if turn == 0 and scene.regions:
        return _written(oracle_glances(scene, Sizes())[0])
    return answer_text(PRIOR_DIGIT if scene.puzzle is Puzzle.PRIOR else guess(scene, rng))


def _scene_of(request: "ScriptRequest", seed: int) -> tuple[Scene, random.Random]:
    split, index = request.noise.sample.rsplit("/", 1)[-1].split(":")
    rng = random.Random(f"trace/{request.noise.seed}/{request.noise.sample}/{request.noise.sibling}")
    return scene_at(split, seed, int(index)), rng


def _pixels(image: bytes) -> Pixels:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))


def _written(glance: Glance) -> str:
    return call_text(glance.box, glance.turn, glance.contrast)


def _meet(first: Box, other: Box) -> bool:
    return first[0] < other[2] and other[0] < first[2] and first[1] < other[3] and other[1] < first[3]

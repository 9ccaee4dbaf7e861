"""Scripted traces of `tinylook` to learn from before RL, and scripted policies to measure with.

`script(seed)` writes them episode by episode with real tools (`sft.script`, or `engine=scripted`), `demonstrations`
gives the same conversations at once, for a model that is taught outside of a run.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.tasks.tinylook.canvas import Box, Sizes
from turnwise.tasks.tinylook.language import answer_text, call_text
from turnwise.tasks.tinylook.rows import png_url, row_of
from turnwise.tasks.tinylook.scenes import Knobs, Scene, scene_at
from turnwise.tasks.tinylook.solvers import Glance, oracle_glances, random_glance

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
        split, index = request.noise.sample.rsplit("/", 1)[-1].split(":")
        scene = scene_at(split, seed, int(index))
        rng = random.Random(f"trace/{request.noise.seed}/{request.noise.sample}/{request.noise.sibling}")
        glances = taught_glances(scene, rng, Sizes())
        if request.turn < len(glances):
            return _written(glances[request.turn])
        return answer_text(scene.answer)

    return say


def _written(glance: Glance) -> str:
    return call_text(glance.box, glance.turn, glance.contrast)


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]

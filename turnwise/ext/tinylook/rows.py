"""Rows of `tinylook`: the question with the small view, the canvas for the tools, and a ground truth with its boxes."""

import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from turnwise.data.write import write_rows
from turnwise.errors import ConfigError, DataError
from turnwise.errors.nearest_name import unknown
from turnwise.ext.tinylook.canvas import Pixels, Sizes
from turnwise.ext.tinylook.language import CANVAS, Puzzle
from turnwise.ext.tinylook.look_grid import VIEW
from turnwise.ext.tinylook.scenes import Knobs, Scene, scene_at
from turnwise.system.image_bytes import data_url

NAME = "tinylook"
SPLITS = ("train", "test")
LOOK, CODE = "look", "python"
"""Tools that read the canvas."""


def rows(split: str, seed: int = 0, knobs: Knobs | None = None) -> Iterator[dict[str, Any]]:
    """verl-shaped rows without end; row `index` is that of `scene_at(split, seed, index, knobs)`."""
    if split not in SPLITS:
        raise DataError(unknown(f"split of {NAME}", split, SPLITS))
    knobs = knobs or Knobs()
    index = 0
    while True:
        yield row_of(scene_at(split, seed, index, knobs), split, seed, index, knobs.sizes)
        index += 1


def row_of(scene: Scene, split: str, seed: int, index: int, sizes: Sizes) -> dict[str, Any]:
    """One row. What tools and the sandbox are given is the canvas alone: neither its name nor its file tells more."""
    canvas = png_url(scene.pixels)
    view = {} if sizes.view == VIEW else {"view": sizes.view}
    return {
        "data_source": f"{NAME}/{scene.puzzle}",
        "prompt": [{"role": "user", "content": f"<image>{scene.question}"}],
        "images": [png_url(view_of(scene.pixels, sizes.view))],
        "ability": "vision",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": scene.answer, "target_boxes": [list(box) for box in scene.targets]},
        },
        "tools_kwargs": {
            LOOK: {"create_kwargs": {"image": canvas, **view}},
            CODE: {"create_kwargs": {"image": canvas}},
        },
        "extra_info": {"split": split, "index": index, "seed": seed},
    }


def view_of(pixels: Pixels, side: int) -> Pixels:
    """The canvas as a square of this side that shows no more than one of half of it would: every 2x2 pixels are alike.

    With all the detail of its size, digits could be told by the shade of a few pixels more often than by chance.
    """
    import numpy as np
    from PIL import Image

    coarse = Image.fromarray(pixels).resize((side // 2, side // 2), Image.Resampling.BOX)
    return np.asarray(coarse.resize((side, side), Image.Resampling.BOX))


def png_url(pixels: Pixels) -> str:
    """A PNG without any words in it, as a data URL."""
    from PIL import Image

    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "png", compress_level=1, compress_type=3)  # runs of one colour: all there is
    url = data_url(held.getvalue())
    assert url is not None
    return url


def prepare(
    out: Path,
    *,
    seed: Annotated[int, "of the scenes"] = 0,
    train: Annotated[int, "rows of train.parquet"] = 4000,
    test: Annotated[int, "rows of test.parquet"] = 500,
    puzzles: Annotated[str, "which, with weights if any: read,search=2,none=0.5; empty for all"] = "",
    canvas: Annotated[int, "pixels of its side"] = CANVAS,
    view: Annotated[int, "pixels of what the policy is shown"] = VIEW,
) -> dict[Path, int]:
    """Write train.parquet and test.parquet; returns the rows of each file."""
    knobs = read_knobs(puzzles, canvas, view)
    return {
        out / f"{split}.parquet": write_rows(list(islice(rows(split, seed, knobs), count)), out / f"{split}.parquet")
        for split, count in (("train", train), ("test", test))
    }


def read_knobs(puzzles: str = "", canvas: int = CANVAS, view: int = VIEW) -> Knobs:
    """Knobs from what a person writes; ConfigError for what cannot be."""
    weights = {}
    for entry in puzzles.split(",") if puzzles else list(Puzzle):
        name, _, weight = entry.strip().partition("=")
        if name not in list(Puzzle):
            raise ConfigError(unknown("puzzle", name, [puzzle.value for puzzle in Puzzle]))
        if Puzzle(name) in weights:
            raise ConfigError(f"{name} is named twice")
        try:
            weights[Puzzle(name)] = float(weight or 1)
        except ValueError as error:
            raise ConfigError(f"the weight of {name} is a number, not {weight!r}") from error
    try:
        return Knobs(Sizes(canvas, view), weights)
    except ValueError as error:
        raise ConfigError(str(error)) from error

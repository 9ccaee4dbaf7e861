"""The task tinylook: what is drawn, its closed language, its looks, and solvers that read nothing but pixels."""

import asyncio
import base64
import io
import json
import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pictures

from turnwise.chat.formats import hermes
from turnwise.data.rows import as_row
from turnwise.data.samples import to_sample
from turnwise.data.task import known_scorers, load_task
from turnwise.errors import ConfigError, DataError
from turnwise.ext.tinylook.canvas import Sizes, split_of
from turnwise.ext.tinylook.language import VOCABULARY, Puzzle, answer_text, call_text, pieces
from turnwise.ext.tinylook.look import look
from turnwise.ext.tinylook.rows import prepare, read_knobs, rows, view_of
from turnwise.ext.tinylook.scenes import PRIOR_DIGIT, Knobs, Scene, draw, scene_at
from turnwise.ext.tinylook.solvers import (
    Glance,
    answer_from,
    around,
    covering,
    guess,
    oracle_glances,
    random_glance,
)
from turnwise.ext.tinylook.traces import MISSED, demonstrations, taught_glances
from turnwise.rollout.tools.tool import ToolContext
from turnwise.types import Sample, ToolCall

SIZES = Sizes()
EACH = 30


def scenes(puzzle: Puzzle, count: int = EACH, split: str = "test", sizes: Sizes = SIZES) -> list[Scene]:
    return [draw(puzzle, split, random.Random(f"{puzzle}/{split}/{number}"), sizes) for number in range(count)]


def sample_of(row: dict[str, Any]) -> Sample:
    return to_sample(as_row(row, Path("test"), 0, "test"), prompt_key="prompt")


def pixels_of(url: str) -> np.ndarray:
    return np.asarray(Pictures.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))


@pytest.mark.parametrize("puzzle", list(Puzzle))
def test_the_oracle_reads_the_answer_in_its_own_looks(puzzle: Puzzle) -> None:
    found = blank = 0
    for number, scene in enumerate(scenes(puzzle)):
        view, glances = view_of(scene.pixels, SIZES.view), oracle_glances(scene, SIZES)
        shown = [glance.at(scene.pixels, SIZES.view) for glance in glances]
        found += answer_from(scene, view, glances, shown, SIZES) == scene.answer
        grey = [np.full_like(one, 127) for one in shown]
        blank += answer_from(scene, np.full_like(view, 127), glances, grey, SIZES) == scene.answer
        assert len(glances) == {"none": 0, "compare": 2}.get(puzzle, len(glances)) <= 5, number
    assert (found, blank) == (EACH, 0)


@pytest.mark.parametrize("sizes", [Sizes(128, 64), Sizes(512, 64), Sizes(1024, 128)])
def test_other_sizes_can_be_solved_too(sizes: Sizes) -> None:
    for puzzle in Puzzle:
        for scene in scenes(puzzle, 3, sizes=sizes):
            glances = oracle_glances(scene, sizes)
            shown = [glance.at(scene.pixels, sizes.view) for glance in glances]
            view = view_of(scene.pixels, sizes.view)
            assert view.shape == (sizes.view, sizes.view, 3)
            assert answer_from(scene, view, glances, shown, sizes) == scene.answer, (puzzle, sizes)


def test_a_look_anywhere_is_hardly_better_than_a_guess() -> None:
    right = 0
    for number, scene in enumerate(scenes(Puzzle.READ, 100)):
        rng = random.Random(number)
        glance = random_glance(rng, SIZES)
        read = answer_from(scene, scene.pixels, [glance], [glance.at(scene.pixels, SIZES.view)], SIZES)
        right += (read or guess(scene, rng)) == scene.answer
    assert right < 35


def test_train_and_test_share_no_place_of_a_target_whatever_the_seed() -> None:
    for puzzle in set(Puzzle) - {Puzzle.NONE, Puzzle.COUNT, Puzzle.COMPUTE}:
        for split in ("train", "test"):
            for scene in scenes(puzzle, 10, split):
                assert all(split_of(target[0], target[1]) == split for target in scene.targets), puzzle
    for puzzle in (Puzzle.COUNT, Puzzle.COMPUTE):
        assert {split_of(*scene.regions[0][:2]) for scene in scenes(puzzle, 10)} == {"test"}


def test_answers_are_balanced_but_for_the_prior() -> None:
    def shares(puzzle: Puzzle) -> Counter[str]:
        return Counter(scene.answer for scene in scenes(puzzle, 300))

    assert max(shares(Puzzle.READ).values()) < 60 and len(shares(Puzzle.READ)) == 10
    assert 110 < shares(Puzzle.COMPARE)["left"] < 190
    assert set(shares(Puzzle.COUNT)) == set("123456789")
    assert 180 < shares(Puzzle.PRIOR)[PRIOR_DIGIT] < 240


def test_a_scene_is_its_own() -> None:
    one, again, other = scene_at("train", 0, 7), scene_at("train", 0, 7), scene_at("train", 1, 7)
    assert np.array_equal(one.pixels, again.pixels) and one.answer == again.answer
    assert not np.array_equal(one.pixels, other.pixels)


def test_the_view_shows_marks_and_no_digits() -> None:
    """Two canvases that differ in the digit alone: the views differ by a few shades, where the digit stands."""
    scene = scenes(Puzzle.READ, 1)[0]
    left, upper, right, lower = scene.targets[0]
    without = scene.pixels.copy()
    without[upper:lower, left:right] = without[0, 0]
    with_it, bare = view_of(scene.pixels, 64).astype(int), view_of(without, 64).astype(int)
    changed = np.abs(with_it - bare).max(2) > 0
    assert 0 < changed.sum() <= 16
    assert np.array_equal(with_it[0::2], with_it[1::2]) and np.array_equal(with_it[:, 0::2], with_it[:, 1::2])


# --- the language -------------------------------------------------------------------------------------------------


def test_all_that_is_said_is_made_of_the_vocabulary() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) < 200
    for shown in islice(demonstrations(0, 60), 60):
        question = shown.row["prompt"][0]["content"].removeprefix("<image>")
        assert "".join(pieces(question)) == question and len(pieces(question)) <= 7
        assert len(pieces(shown.answer)) == 3
        for call, _ in shown.looks:
            assert len(pieces(call)) <= 12 and "".join(pieces(call)) == call
    assert pieces("16, 9") == ["16", ", ", "9"]
    with pytest.raises(ValueError, match="not in the vocabulary"):
        pieces("é")


def test_a_call_is_what_the_hermes_format_writes_and_reads() -> None:
    for box, turn, contrast in (((3, 5, 7, 9), None, False), ((0, 0, 16, 16), 270, True), ((1, 2, 3, 4), None, True)):
        arguments: dict[str, Any] = {"box": list(box)}
        arguments |= {"turn": turn} if turn else {}
        arguments |= {"contrast": True} if contrast else {}
        text = call_text(box, turn, contrast)
        assert text == hermes.render_call(ToolCall("", "look", arguments))
        assert hermes.parse(text, turn=0, in_reasoning=False).tool_calls[0].arguments == arguments
    assert answer_text("7") == "<answer>7</answer>"


# --- rows and looks -----------------------------------------------------------------------------------------------


def test_rows_give_tools_the_canvas_and_nothing_of_the_answer() -> None:
    for index, row in enumerate(islice(rows("test", 3), 12)):
        scene, sample = scene_at("test", 3, index), sample_of(row)
        assert sample.data_source == f"tinylook/{scene.puzzle}"
        assert sample.ground_truth == {"target": scene.answer, "target_boxes": [list(box) for box in scene.targets]}
        assert pixels_of(sample.images[0].source).shape == (64, 64, 3)
        for tool in ("look", "python"):
            assert np.array_equal(pixels_of(sample.tools_kwargs[tool]["create_kwargs"]["image"]), scene.pixels)
        assert set(sample.info["extra_info"]) == {"split", "index", "seed"}
        canvas = base64.b64decode(row["tools_kwargs"]["look"]["create_kwargs"]["image"].partition(",")[2])
        assert not re.search(rb"tEXt|iTXt|zTXt|eXIf|tIME", canvas)


def looked(sample: Sample, **arguments: Any) -> Any:
    async def work() -> Any:
        session = await look.open(ToolContext(sample, sample.tools_kwargs["look"]))
        return await session.call(arguments)

    return asyncio.run(work())


def test_a_look_gives_its_part_of_the_canvas_and_notes_which() -> None:
    row = next(iter(rows("test", 0, Knobs(weights={Puzzle.READ: 1.0}))))
    scene, sample = scene_at("test", 0, 0, Knobs(weights={Puzzle.READ: 1.0})), sample_of(row)
    result = looked(sample, box=[3, 5, 7, 9], turn=90)
    shown = pixels_of(result.images[0].source)
    assert np.array_equal(shown, np.rot90(scene.pixels[80:144, 48:112], -1))
    assert np.array_equal(shown, Glance((3, 5, 7, 9), 90).at(scene.pixels, 64))
    (facts,) = result.info["images"]
    assert (facts["box"], facts["size"], facts["provenance"]) == ([48, 80, 112, 144], [64, 64], "verified")
    assert facts["source"] == "canvas_0.png" and facts["source_size"] == [256, 256]
    assert [step["name"] for step in facts["steps"]] == ["crop", "rotate", "resize"]
    a, b, c, d, e, f = facts["matrix"]
    assert np.array_equal(shown[10, 20], scene.pixels[int(d * 20.5 + e * 10.5 + f), int(a * 20.5 + b * 10.5 + c)])
    assert result.text == "seen"


def test_boxes_that_hold_nothing_are_refused_in_words_of_the_vocabulary() -> None:
    from turnwise.errors import EpisodeError, ToolError

    row = next(iter(rows("test", 0)))
    for box in ([3, 3, 3, 9], [9, 3, 3, 9], [0, 5, 9, 4]):
        with pytest.raises(ToolError) as caught:
            looked(sample_of(row), box=box)
        assert len(pieces(f"Error: {caught.value}")) == 2
    sample = sample_of(row)
    sample.tools_kwargs["look"]["create_kwargs"]["view"] = 10**9
    with pytest.raises(EpisodeError, match="view is a number of pixels"):
        looked(sample, box=[0, 0, 1, 1])


def test_boxes_in_sixteenths() -> None:
    assert around((120, 120, 136, 136), SIZES) == (6, 6, 10, 10)
    assert around((0, 0, 10, 10), SIZES) == (0, 0, 4, 4) and around((250, 250, 256, 256), SIZES) == (12, 12, 16, 16)
    assert covering((32, 48, 64, 80), SIZES) == (2, 3, 4, 5)


def test_demonstrations_err_and_mend_and_leave_tools_alone_where_none_are_needed() -> None:
    made = list(demonstrations(0, 150))
    none = [one for one in made if one.row["data_source"] == "tinylook/none"]
    assert 0.1 < len(none) / len(made) < 0.32 and not any(one.looks for one in none)
    missed = 0
    needing = [scene for scene in (scene_at("train", 0, index) for index in range(150)) if scene.regions]
    for number, scene in enumerate(needing):
        glances = taught_glances(scene, random.Random(number), SIZES)
        missed += len(glances) > len(oracle_glances(scene, SIZES))
        shown = [glance.at(scene.pixels, 64) for glance in glances]
        assert answer_from(scene, scene.pixels, glances, shown, SIZES) == scene.answer
    assert abs(missed / len(needing) - MISSED) < 0.12


def test_prepare_writes_what_was_asked_for(tmp_path: Path) -> None:
    written = prepare(tmp_path, train=6, test=4, puzzles="read,none=0.5", seed=2)
    assert {path.name: count for path, count in written.items()} == {"train.parquet": 6, "test.parquet": 4}
    from turnwise.data.loader import load_samples

    found = load_samples([tmp_path / "test.parquet"], prompt_key="prompt")
    assert {sample.data_source for sample in found} <= {"tinylook/read", "tinylook/none"}
    assert json.dumps(found[0].ground_truth)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"puzzles": "reed"}, "did you mean 'read'"), ({"puzzles": "read=x"}, "a number"),
        ({"puzzles": "read=-1"}, "from 0 on"), ({"puzzles": "read=0"}, "above it"), ({"puzzles": "read=nan"}, "not read=nan"),
        ({"puzzles": "read,none,read=2"}, "read is named twice"),
        ({"canvas": 100}, "two, four or eight"), ({"canvas": 2048}, "two, four or eight"), ({"view": 20}, "64 to 256"),
    ],
)  # fmt: skip
def test_knobs_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_knobs(**given)


def test_the_task_is_known_by_each_of_its_data_sources() -> None:
    task = load_task("tinylook")
    assert set(task.sources) == {"tinylook", *(f"tinylook/{puzzle}" for puzzle in Puzzle)}
    assert {known_scorers()[source] for source in task.sources} == {"turnwise.ext.tinylook.reward:tinylook"}
    with pytest.raises(DataError, match="split of tinylook"):
        next(iter(rows("tset")))

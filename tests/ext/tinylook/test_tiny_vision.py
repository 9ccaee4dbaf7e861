"""The tiny vision-language model: its forward pass is transformers' own, and its lessons say what they should."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision_recipe import (
    DILIGENT,
    FINE,
    GLYPHS,
    IMAGE,
    INKS,
    SHIPPED,
    TOKENS,
    Habits,
    Taught,
    Trace,
    encode,
    fresh_model,
    look,
    looks,
    make_processor,
    make_tokenizer,
    pad,
    patches,
    recipe,
    run_text,
    trace_of,
    write_folder,
)  # fmt: skip
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

import turnwise as tw
from turnwise.data.task import load_task
from turnwise.ext.tinylook.canvas import Sizes
from turnwise.ext.tinylook.language import Puzzle, answer_text, call_text, pieces
from turnwise.ext.tinylook.scenes import draw
from turnwise.ext.tinylook.solvers import Glance
from turnwise.types import CallStatus


def _scene(puzzle: Puzzle):  # type: ignore[no-untyped-def]
    return draw(puzzle, "train", random.Random(3), Sizes())


def test_the_batched_forward_pass_is_the_model_s_own(tmp_path: Path) -> None:
    tokenizer = write_folder(tmp_path)
    model = fresh_model(len(tokenizer), tokenizer.get_vocab(), seed=0).eval()
    traces = [trace_of(_scene(puzzle), random.Random(0), DILIGENT) for puzzle in (Puzzle.READ, Puzzle.COMPARE)]
    batch = Taught.of(pad(tokenizer, [encode(tokenizer, trace) for trace in traces]))
    shown = [Image.fromarray(image.numpy()) for image in batch.images]
    arrays = make_processor()(images=shown, return_tensors="pt")
    assert torch.equal(arrays["pixel_values"].view(len(shown), -1, 192), patches(batch.images))
    with torch.no_grad():
        own = model.model.get_image_features(**arrays)
        features, deep = look(model, batch.images)
        torch.testing.assert_close(features, torch.stack(list(own.pooler_output)), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            deep[0].flatten(0, 1), torch.cat(list(own.deepstack_features[0])), atol=1e-5, rtol=1e-4
        )
        found = model.lm_head(run_text(model, batch.token_ids, batch.images, batch.positions))
        images = batch.token_ids == model.config.image_token_id
        expected = model(input_ids=batch.token_ids, mm_token_type_ids=images.int(), **arrays).logits
    ends = [len(encode(tokenizer, trace)[0]) for trace in traces]
    for row, end in enumerate(ends):
        torch.testing.assert_close(found[row, :end], expected[row, :end], atol=1e-4, rtol=1e-3)


def test_the_words_of_the_task_are_whole_tokens_and_any_other_text_comes_back() -> None:
    tokenizer = make_tokenizer()
    for text in ("turned digit at red", call_text((3, 5, 7, 16), 90, True), call_text((0, 0, 8, 8)), answer_text("27")):
        assert [tokenizer.decode([token]) for token in tokenizer(text).input_ids] == pieces(text)
    for text in ("wörter ≠ 31\n\t<tool_call>", "call me at 256"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_only_what_the_assistant_says_is_learned() -> None:
    scene, tokenizer = _scene(Puzzle.COMPARE), make_tokenizer()
    tokenizer.chat_template = (SHIPPED / "chat_template.jinja").read_text()
    trace = trace_of(scene, random.Random(0), DILIGENT)
    ids, learned, images = encode(tokenizer, trace)
    said = [call_text(glance.box, glance.turn, glance.contrast) for glance, _ in trace.looks]
    assert len(said) == 2 and trace.answer == scene.answer and len(images) == 3
    end = "<|im_end|>"
    assert tokenizer.decode(ids[learned]) == "".join(f"{one}{end}" for one in (*said, answer_text(scene.answer)))
    assert (ids == tokenizer.convert_tokens_to_ids(IMAGE)).sum() == TOKENS * len(images)


def test_habits_say_how_often_the_script_errs() -> None:
    def tried(puzzle: Puzzle, habits: Habits) -> list[Trace]:
        scene, rng = _scene(puzzle), random.Random(1)
        return [trace_of(scene, rng, habits) for _ in range(60)]

    assert {len(one.looks) for one in tried(Puzzle.NONE, Habits(needless=1))} == {1}
    assert {len(one.looks) for one in tried(Puzzle.NONE, DILIGENT)} == {0}
    assert {(len(one.looks), one.answer) for one in tried(Puzzle.PRIOR, Habits(prior=1))} == {(0, "7")}
    missed = tried(Puzzle.READ, Habits(missed=1, guessed=0))
    assert {len(one.looks) for one in missed} == {1, 2}
    right = trace_of(_scene(Puzzle.READ), random.Random(0), DILIGENT).looks[0][0]
    assert all(one.looks[-1][0] == right for one in missed if len(one.looks) == 2)
    assert {one.looks[0][0].box for one in missed} == {(6, 6, 10, 10)} and right.box != (6, 6, 10, 10)
    assert isinstance(right, Glance)


def test_a_sketch_names_what_stands_in_its_cells() -> None:
    seen = looks(random.Random(5), 8)
    whole = seen[0]
    assert not whole.glyphs.any() and whole.inks.any()  # from afar colours can be told and digits cannot
    near = [one for one in seen[1:] if one.glyphs.any()]
    assert near and max(int(one.glyphs.max()) for one in near) < len(GLYPHS)
    for one in seen:
        assert one.pixels.shape == (64, 64, 3) and one.glyphs.shape == (16, 4) and one.inks.shape == (16, 16)
        assert not one.beside[one.inks == 0].any()
        cells = one.inks.reshape(4, 4, 4, 4).transpose(0, 2, 1, 3).reshape(FINE, FINE)
        for row, column in np.argwhere(cells > 0):
            cell = one.pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].astype(int)
            assert np.ptp(cell, axis=-1).max() > 20, INKS[cells[row, column]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    given = ["--seeing-steps", "2", "--seeing-batch", "8", "--steps", "4", "--batch", "2"]
    recipe.main(["--out", str(out), *given])
    return out


def test_the_recipe_writes_a_folder_that_transformers_reads(made: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(made, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(made)
    arrays = AutoImageProcessor.from_pretrained(made)(images=[Image.new("RGB", (64, 64))], return_tensors="pt")
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "digit at red"}]}]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text.replace(IMAGE, IMAGE * TOKENS), return_tensors="pt").input_ids
    images = (ids == model.config.image_token_id).int()
    written = model.generate(input_ids=ids, mm_token_type_ids=images, **arrays, max_new_tokens=2, do_sample=False)
    assert written.shape[1] in (ids.shape[1] + 1, ids.shape[1] + 2)


def test_the_bundled_weights_read_what_a_right_look_shows_them() -> None:
    model = AutoModelForImageTextToText.from_pretrained(SHIPPED, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    scenes = [draw(Puzzle.READ, "test", random.Random(number), Sizes()) for number in range(40)]
    batch = Taught.of(pad(tokenizer, [encode(tokenizer, trace_of(one, random.Random(0), DILIGENT)) for one in scenes]))
    with torch.no_grad():
        written = model.lm_head(run_text(model, batch.token_ids, batch.images, batch.positions)).argmax(-1)
    opened = batch.token_ids == tokenizer.convert_tokens_to_ids("<answer>")
    read = [tokenizer.decode([token]) for token in written[opened]]
    assert sum(said == scene.answer for said, scene in zip(read, scenes, strict=True)) > 0.75 * len(scenes)


def test_the_bundled_weights_have_the_habits_that_rl_is_to_unlearn(tmp_path: Path) -> None:
    """Likeliest is a look where there is nothing, or one that nothing needs; the tokenizer is the recipe's."""
    load_task("tinylook").prepare(tmp_path / "data", train=1, test=40, puzzles="read,none")
    test = tmp_path / "data" / "test.parquet"
    report = tw.evaluate(tw.configure(
        "task=tinylook", "model.path=tiny_vision", "eval.samples=40", "sampling.temperature=0", "engine.threads=1",
        f"data.eval_files=['{test}']", f"runs_dir='{tmp_path}'",
    ))  # fmt: skip
    none, read = (
        [one for one in report.trajectories if one.sample.data_source == f"tinylook/{kind}"]
        for kind in ("none", "read")
    )
    assert sum(bool(one.right) for one in none) > 0.9 * len(none) and sum(bool(one.calls) for one in none) > 0
    assert sum(bool(one.calls) for one in read) > 0.7 * len(read)
    assert sum(bool(one.right) for one in read) < 0.5 * len(read)
    assert all(call.status is CallStatus.OK for one in (*none, *read) for call in one.calls)
    shipped, made = AutoTokenizer.from_pretrained(SHIPPED), write_folder(tmp_path / "made")
    assert (shipped.get_vocab(), shipped.chat_template) == (made.get_vocab(), made.chat_template)

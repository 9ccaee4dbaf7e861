"""V*Bench, HR-Bench and MathVista in the layouts they are published in: rows, refusals, scores, an evaluation."""

import asyncio
import base64
import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Picture

import turnwise as tw
from turnwise.commands.cli import main
from turnwise.data.loader import load_samples
from turnwise.data.task import known_scorers, prepare_files
from turnwise.errors import DataError
from turnwise.ext.vision_bench.scoring import vision_bench
from turnwise.types import FinishReason, Image, Message, Role, Sample, StopReason, Trajectory, Turn


def png(shade):
    held = io.BytesIO()
    Picture.new("RGB", (32, 32), (shade, 0, 0)).save(held, "png")
    return held.getvalue()


V_ROWS = [
    {"image": "direct_attributes/sa_1.png", "text": "What is the glove made of?\n(A) rubber\n(B) cotton\nAnswer with the "
     "option's letter from the given choices directly.", "category": "direct_attributes", "label": "B", "question_id": 0},
    {"image": "relative_position/sa_2.png", "text": "Is the dog left or right of the car?\n(A) left\n(B) right",
     "category": "relative_position", "label": "A", "question_id": 1},
]  # fmt: skip
HR_ROW = {"question": "What number is on the door?", "category": "single", "cycle_category": "0"}
HR_ROWS = [
    {"index": 0, **HR_ROW, "A": "7", "B": "8", "C": "9", "D": "6", "answer": "A"},
    {"index": 1, **HR_ROW, "A": "6", "B": "7", "C": "8", "D": "9", "answer": "B", "cycle_category": "1"},
    {"index": 2, **HR_ROW, "A": "x", "B": "y", "C": "z", "D": "w", "answer": "D", "category": "cross"},
]
MATH_ROW = {"unit": None, "precision": None, "choices": None, "question_type": "free_form"}
MATH_ROWS = [
    {"pid": "1", "question": "Which line is longer?", "image": "images/1.png", **MATH_ROW, "choices": ["red", "blue"],
     "answer": "blue", "answer_type": "text", "question_type": "multi_choice",
     "query": "Hint: give the option letter.\nQuestion: Which line is longer?\nChoices:\n(A) red\n(B) blue",
     "metadata": {"task": "geometry problem solving", "category": "math-targeted-vqa", "grade": "high school"}},
    {"pid": "2", "question": "How long is it?", "image": "images/2.png", **MATH_ROW, "unit": "cm", "precision": 1.0,
     "answer": "1.5", "answer_type": "float", "metadata": {"task": "figure question answering"}},
    {"pid": "3", "question": "Which values?", "image": "images/3.png", **MATH_ROW, "answer": "[0, 5]",
     "answer_type": "list", "metadata": {"task": "figure question answering"}},
]  # fmt: skip


def vstar(folder):
    for number, row in enumerate(V_ROWS):
        path = folder / row["image"]
        path.parent.mkdir(parents=True)
        path.write_bytes(png(number))
        path.with_suffix(".json").write_text(json.dumps({"target_object": ["it"], "bbox": [[4, 6, 10, 20]]}))
    (folder / "test_questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in V_ROWS))


def hr_parquet(folder):
    images = [base64.b64encode(png(shade)).decode() for shade in (0, 0, 1)]
    rows = [row | {"image": image} for row, image in zip(HR_ROWS, images, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "hr_bench_4k.parquet")


def hr_table(folder):
    images = [base64.b64encode(png(0)).decode(), "0", base64.b64encode(png(1)).decode()]
    rows = [row | {"image": image} for row, image in zip(HR_ROWS, images, strict=True)]
    with (folder / "HRBench4K.tsv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)


def math_parquet(folder):
    (folder / "data").mkdir()
    rows = [row | {"decoded_image": {"bytes": png(n), "path": None}} for n, row in enumerate(MATH_ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data" / "testmini-00000-of-00001-725687bf7a18d64b.parquet")


def math_object(folder):
    (folder / "images").mkdir()
    for number in range(3):
        (folder / MATH_ROWS[number]["image"]).write_bytes(png(number))
    rows = {row["pid"]: {key: value for key, value in row.items() if key != "pid"} for row in MATH_ROWS}
    (folder / "testmini.json").write_text(json.dumps(rows, indent=2))


LAYOUTS = {
    "vstar": ("vstar", vstar), "hr_parquet": ("hrbench", hr_parquet), "hr_table": ("hrbench", hr_table),
    "math_parquet": ("mathvista", math_parquet), "math_object": ("mathvista", math_object),
}  # fmt: skip


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    return folder


def prepared(layout, source, *options):
    task, write = LAYOUTS[layout]
    write(source)
    (path,) = prepare_files(task, ["--source", str(source), "--out", str(source.parent / "rows"), *options])
    return path, load_samples([path], prompt_key="prompt")


def test_vstar_is_asked_as_published_and_knows_where_the_target_is(source):
    path, samples = prepared("vstar", source, "--env-name", "code")
    assert [sample.data_source for sample in samples] == ["vstar/direct_attributes", "vstar/relative_position"]
    assert [sample.ground_truth for sample in samples] == ["B", "A"]
    (asked,) = samples[0].prompt
    assert asked.text.lstrip() == V_ROWS[0]["text"] and isinstance(asked.content[0], Image)
    extra = samples[0].info["extra_info"]
    assert extra["options"] == ["rubber", "cotton"] and extra["target_boxes"] == [[4.0, 6.0, 14.0, 26.0]]
    assert samples[0].info["env_name"] == "code" and len(list((path.parent / "images").iterdir())) == 2


@pytest.mark.parametrize("layout", ["hr_parquet", "hr_table"])
def test_hrbench_lists_the_options_and_keeps_an_image_once(layout, source):
    path, samples = prepared(layout, source)
    assert [sample.data_source.split("/") for sample in samples] == [
        ["hrbench_4k", kind] for kind in ("single", "single", "cross")
    ]
    assert [sample.ground_truth for sample in samples] == ["A", "B", "D"]
    assert samples[1].prompt[0].text.lstrip() == (
        "What number is on the door?\nA. 6\nB. 7\nC. 8\nD. 9\nAnswer with the letter of the right option."
    )
    assert samples[0].images == samples[1].images != samples[2].images
    assert samples[1].info["extra_info"]["cycle_category"] == "1" and len(list((path.parent / "images").iterdir())) == 2


@pytest.mark.parametrize("layout", ["math_parquet", "math_object"])
def test_mathvista_has_options_numbers_and_lists(layout, source):
    _, samples = prepared(layout, source)
    choice, number, several = samples
    assert choice.data_source == "mathvista/geometry_problem_solving" and choice.ground_truth == "B"
    assert choice.prompt[0].text.lstrip() == MATH_ROWS[0]["query"]
    assert number.prompt[0].text.lstrip() == "How long is it? (in cm)\nAnswer with a number of 1 decimal places."
    assert (number.ground_truth, number.info["extra_info"]["precision"]) == ("1.5", 1)
    assert several.prompt[0].text.endswith("Answer with a list such as [1, 2].") and several.ground_truth == "[0, 5]"
    assert choice.info["extra_info"]["grade"] == "high school"


def spoil(source, name, change):
    path = source / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("layout", "name", "change", "said"),
    [
        ("vstar", "test_questions.jsonl", lambda text: text.replace(b"direct_attributes/sa", b"../secret"), "row 0: image: there is no file"),
        ("vstar", "test_questions.jsonl", lambda text: text.replace(b'"B"', b'"E"'), "row 0: label: expected one of A, B, got 'E'"),
        ("vstar", "test_questions.jsonl", lambda text: text.replace(b'"question_id": 1', b'"question_id": 0'), "the question 0 is there twice"),
        ("vstar", "direct_attributes/sa_1.png", lambda _: b"#!/bin/sh", "row 0: image: these bytes are not a PNG"),
        ("vstar", "direct_attributes/sa_1.json", lambda _: b'{"bbox": [[1, "x", 2, 3]]}', "sa_1.json: bbox: expected boxes"),
        ("hr_table", "HRBench4K.tsv", lambda text: text.replace(b"\t0\r\n1\t", b"\t9\r\n1\t"), None),
        ("hr_table", "HRBench4K.tsv", lambda text: text.replace(b"iVBOR", b"AAAAA"), "row 0: image: "),
        ("math_object", "testmini.json", lambda text: text.replace(b'"blue",\n    "answer_type"', b'"green",\n    "answer_type"'), "row 0: answer: 'green' is none of the choices"),
        ("math_object", "testmini.json", lambda text: text.replace(b'"1.5"', b'""'), "row 1: answer .the split test has none; testmini does.: empty"),
        ("math_object", "testmini.json", lambda _: b"[" * 100_000, "testmini.json: JSON nested too deeply"),
        ("math_object", "testmini.json", lambda _: b'{"1": 5}', "the question 1 is a number, not an object"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_line(layout, name, change, said, source):
    task, write = LAYOUTS[layout]
    write(source)
    spoil(source, name, change)
    arguments = ["--source", str(source), "--out", str(source.parent / "rows")]
    if said is None:  # a change that is none: the same rows as before
        assert list(prepare_files(task, arguments).values()) == [3]
        return
    with pytest.raises(DataError, match=said) as refused:
        prepare_files(task, arguments)
    assert "\n" not in str(refused.value) and not (source.parent / "rows" / "test.parquet").exists()


def test_folders_that_hold_nothing_are_refused(tmp_path, source):
    for task, wanted in (("vstar", "test_questions.jsonl"), ("hrbench", r"\*4k\*.parquet"), ("mathvista", "testmini")):
        with pytest.raises(DataError, match=wanted):
            prepare_files(task, ["--source", str(source), "--out", str(tmp_path / "rows")])
        with pytest.raises(DataError, match="--source must name the folder"):
            prepare_files(task, ["--out", str(tmp_path / "rows")])
    with pytest.raises(DataError, match="is not a folder"):
        prepare_files("vstar", ["--source", str(tmp_path / "none"), "--out", str(tmp_path / "rows")])


LETTER = {"answer_kind": "letter", "options": ["a rubber sole", "cotton", "kevlar"]}
FLOAT = {"answer_kind": "float", "precision": 2}


@pytest.mark.parametrize(
    ("truth", "extra", "answer", "right", "formed"),
    [
        ("B", LETTER, "B", True, True),
        ("B", LETTER, "(B).", True, True),
        ("B", LETTER, "B. cotton", True, True),
        ("B", LETTER, "Cotton", True, True),
        ("B", LETTER, "I looked closely. The answer is (B) cotton.", True, True),
        ("B", LETTER, "First I thought (A). <answer>B</answer>", True, True),
        ("B", LETTER, r"So \boxed{B}", True, True),
        ("B", LETTER, "The answer is C", False, True),
        ("B", LETTER, "<answer>the answer may be B or C</answer>", False, False),
        ("A", LETTER, "The answer is A rubber sole", False, False),
        ("B", LETTER, "E", False, False),
        ("B", LETTER, "B B B B", False, False),
        ("B", LETTER, "", False, False),
        ("1.50", FLOAT, "about 1.4999 cm", True, True),
        ("1.50", FLOAT, "<answer>1.5</answer>", True, True),
        ("1.50", FLOAT, "<answer>1.51</answer>", False, True),
        ("0", {"answer_kind": "integer"}, "<answer>0</answer>", True, True),
        ("7", {"answer_kind": "integer"}, "3 + 4 gives 7", True, True),
        ("7", {"answer_kind": "integer"}, "7.2", False, True),
        ("7", {"answer_kind": "integer"}, "seven", False, False),
        ("[0, 5]", {"answer_kind": "list"}, "from [1, 2] to [0, 5.0]", True, True),
        ("[0, 5]", {"answer_kind": "list"}, "[5, 0]", False, True),
        ("[0, 5]", {"answer_kind": "list"}, "0 and 5", False, False),
        ("New York", {"answer_kind": "text"}, "<answer>new york.</answer>", True, True),
        ("New York", {"answer_kind": "text"}, "York", False, True),
    ],
)
def test_answers(truth, extra, answer, right, formed):
    score = asyncio.run(vision_bench(answered(answer, truth, extra)))
    assert (score.reward, score.parts) == (float(right), {"acc": float(right), "format": float(formed)})


def answered(text, truth, extra):
    sample = Sample("s", (Message(Role.USER, "?"),), "vstar/direct_attributes", truth, info={"extra_info": extra})
    message = Message(Role.ASSISTANT, text)
    turn = Turn(0, message, FinishReason.STOP, 0, 0, 0)
    return Trajectory(sample, 0, 0, [*sample.prompt, message], [turn], [], StopReason.ANSWERED, 0.0)


def test_a_row_of_another_kind_is_no_wrong_answer():
    with pytest.raises(DataError, match=r"extra_info.answer_kind must be one of letter, .* not None"):
        asyncio.run(vision_bench(answered("B", "B", {})))
    tagged = answered("<answer>A</answer> <final>B</final>", "B", LETTER)
    assert asyncio.run(vision_bench(tagged, tag="final")).reward == 1.0 != asyncio.run(vision_bench(tagged)).reward
    assert known_scorers()["hrbench_8k/cross"] == "vision_bench" and "vstar" not in known_scorers()


def test_the_bundled_vision_model_is_evaluated_on_them(source, capsys, monkeypatch):
    path, _ = prepared("vstar", source)
    monkeypatch.chdir(source.parent)
    words = ["eval", "task=vstar", "model.path=tiny_vision", f"data.eval_files=[{path}]", "engine.threads=1", "run=v"]
    assert main([*words, "sampling.max_tokens=4", "--json", "--no-transcript"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: one["n"] for name, one in said["sources"].items()} == {
        "vstar/direct_attributes": 1, "vstar/relative_position": 1,
    }  # fmt: skip
    assert 0 <= said["accuracy"] <= 1
    metrics = json.loads((source.parent / "runs/v/metrics.jsonl").read_text().splitlines()[-1])
    assert "val/accuracy/vstar/direct_attributes" in metrics
    assert tw.configure("task=mathvista").data.eval_files == ["data/mathvista/test.parquet"]

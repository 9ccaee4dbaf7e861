"""Rubrics by data source: which one a row is judged by, what each pays, and what cannot be one."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import pytest
from judge_servers import real_server
from PIL import Image as Pillow

from turnwise.errors import ConfigError, PluginError
from turnwise.ext.judge.rubrics import BUNDLED, GENERAL, read_rubrics, rubric_of
from turnwise.scoring.event_loop_resources import close_loop_resources
from turnwise.scoring.scorer import Score, ScorerSpec, evaluate
from turnwise.system.plugins import load
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    Message,
    Remark,
    Role,
    Sample,
    StopReason,
    Text,
    ToolCall,
    Trajectory,
    Turn,
)


def sample(source: str) -> Sample:
    return Sample("s", (Message(Role.USER, "How many red pens lie on the table?"),), source, "3")


def drawn(box: tuple[int, int, int, int], size: tuple[int, int]) -> dict[str, Any]:
    """An image that shows a part of the source, as the python tool notes it."""
    held = io.BytesIO()
    Pillow.new("RGB", size, "red").save(held, "PNG")
    data = "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
    return {"source": "0.png", "source_size": [400, 300], "box": list(box), "size": list(size), "data": data}


NEAR, FAR = drawn((10, 10, 50, 40), (160, 120)), drawn((0, 0, 200, 200), (50, 50))


def played(source: str, *outputs: tuple[str, list[dict[str, Any]]]) -> Trajectory:
    turns = []
    for index, (text, images) in enumerate(outputs):
        call = ToolCall(f"c{index}", "python", {"code": f"look(img0, {index})"})
        record = CallRecord(call, CallStatus.OK, 0.1, info={"images": images} if images else {})
        parts = (Text(text), *(Image(image["data"]) for image in images)) if images else text
        reply = Message(Role.TOOL, parts, tool_call_id=call.id)
        turns.append(
            Turn(
                index, Message(Role.ASSISTANT, "", (call,)), FinishReason.STOP, 0, 1, 1, calls=[record], replies=[reply]
            )
        )
    turns.append(Turn(len(turns), Message(Role.ASSISTANT, "<answer>3</answer>"), FinishReason.STOP, 0, 1, 1))
    return Trajectory(sample(source), 0, 0, [], turns, [], StopReason.ANSWERED, 0.0)


# (data source, what one turn's tools returned) -> (its rubric, the grade that the rule judge gives by it)
GOLDEN = {
    "a search that came near": ("vstar", ("", [NEAR]), "visual_search", 0.75),
    "a search that shrank the image": ("high_res", ("", [FAR]), "visual_search", 0.25),
    "a search that only says so": ("chart", ("red pens on the table", []), "visual_search", 0.0),
    "a calculation with its steps": ("GeoQA", ("a = 3\nb = 4\nc = 5.0", []), "calculation", 1.0),
    "a calculation with one step": ("TabMWP", ("sum 12, mean 4", []), "calculation", 0.75),
    "a bare value": ("Geometry3K", ("42", []), "calculation", 0.25),
    "a figure to read from": ("GeoQA", ("", [NEAR]), "calculation", 0.5),
    "no value": ("TabMWP", ("red pens lie on the table", []), "calculation", 0.0),
    "things with their places": ("IconQA", ("1: 20 40\n2: 30 90\n3: 70 15", []), "counting", 0.75),
    "things with their places, marked": ("IconQA", ("1: 20 40\n2: 30 90", [NEAR]), "counting", 1.0),
    "an image to count in": ("IconQA", ("", [NEAR]), "counting", 0.5),
    "a bare count": ("IconQA", ("3", []), "counting", 0.25),
    "nothing counted": ("IconQA", ("there are many red pens", []), "counting", 0.0),
    "another data source": ("OCR", ("red pens lie table", []), "general", 1.0),
}  # fmt: skip


async def judged(trajectory: Trajectory, url: str, **options: Any) -> Score:
    given = {"accuracy": "text_match", "accuracy_options": {"tag": "answer"}, "judge_options": {"base_urls": [url]}}
    return await evaluate(ScorerSpec("tapo", given | options).make(), trajectory)


def all_judged(*asked: tuple[Trajectory, dict[str, Any]]) -> list[Score]:
    async def main() -> list[Score]:
        try:
            async with real_server() as url:
                return [await judged(trajectory, url, **options) for trajectory, options in asked]
        finally:
            await close_loop_resources()

    return asyncio.run(main())


def test_golden_cases_of_every_rubric_by_the_rule_judge() -> None:
    found = all_judged(*((played(source, output), {}) for source, output, _, _ in GOLDEN.values()))
    for (name, (_, _, rubric, grade)), score in zip(GOLDEN.items(), found, strict=True):
        assert (score.turns, score.parts["tool"]) == ({0: {"tool": grade}}, grade), name
        assert score.reward == 1.0 + 0.3 + 0.5 * grade, name
        told = (Remark("rubric", rubric),) if rubric != GENERAL else ()
        assert score.remarks[-1 - len(told) :] == (*told, Remark("llm", f"{grade:g}", grade, 0)), name
    assert {rubric for _, _, rubric, _ in GOLDEN.values()} == set(read_rubrics(BUNDLED))


def test_calculation_and_counting_are_paid_and_nobody_must_call() -> None:
    needs = {"vstar": "search", "GeoQA": "useful", "TabMWP": "optional", "default": "useful"}
    with_steps = ("a = 3\nb = 4\nc = 5.0", [])
    paid, bare, unpaid, mean = all_judged(
        (played("GeoQA", with_steps), {"need": needs}),
        (played("GeoQA"), {"need": needs}),
        (played("TabMWP", with_steps), {"need": needs}),
        (played("IconQA", ("3", []), ("1: 2 4\n2: 9 9", [])), {"need": needs}),
    )
    assert (paid.parts["tool"], bare.parts["tool"], unpaid.parts["tool"]) == (1.0, 0.0, 0.0)
    assert (bare.reward, unpaid.reward, unpaid.turns) == (1.3, 1.3, {0: {"tool": 0.0}})
    assert unpaid.remarks == ()
    assert mean.turns == {0: {"tool": 0.25}, 1: {"tool": 0.75}} and mean.parts["tool"] == 0.5


def test_code_that_only_prints_is_misuse_where_tools_are_useful() -> None:
    (score,) = all_judged(
        (played("GeoQA", ("5", [])), {"need": "useful"}),
    )
    assert score.parts["tool"] == 0.25
    said = played("GeoQA", ("5", []))
    said.turns[0].calls[0].call.arguments["code"] = "print('5')"
    (score,) = all_judged((said, {"need": "useful"}))
    assert score.turns == {0: {"tool": -0.5}}


def test_the_rubric_is_a_choice_for_all_or_by_data_source(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("ocr:\n  sources: [TextVQA]\n  evidence: Can it be read?\ngeneral:\n  trace: Was it any good?\n")
    assert rubric_of(sample("vstar")).name == "visual_search" and rubric_of(sample("new")).name == GENERAL
    assert rubric_of(sample("vstar"), "counting").name == "counting"
    by_source = {"vstar": "calculation", "TextVQA": f"{mine}:ocr", "default": str(mine)}
    assert rubric_of(sample("vstar"), by_source).name == "calculation"
    ocr = rubric_of(sample("TextVQA"), by_source)
    assert (ocr.name, ocr.evidence, ocr.trace) == ("ocr", "Can it be read?", "Can it be read?")
    assert rubric_of(sample("IconQA"), by_source).evidence == "Was it any good?"
    (tmp_path / "own.py").write_text("def by_row(sample):\n    return f'About {sample.data_source}: is it good?'\n")
    own = rubric_of(sample("maps"), f"{tmp_path}/own.py:by_row")
    assert own.evidence == own.trace == "About maps: is it good?"


WRONG = {
    "a name": ("countin", "did you mean 'counting'"),
    "no data source": ({"vstarr": "counting"}, "rubric: unknown data source 'vstar': did you mean 'vstarr'.*Add it, or a default"),
    "a number": ({"vstar": 3}, "a rubric is a name, FILE.yaml"),
    "no file": ("nowhere.yaml", "nowhere.yaml cannot be read"),
    "no entry of a file": ("FOLDER/fine.yaml:b", "rubric 'b'"),
    "no general one": ("FOLDER/fine.yaml", "rubric 'general'"),
    "a key": ("FOLDER/key.yaml:a", "did you mean 'evidence'"),
    "no text": ("FOLDER/empty.yaml:a", "one of them is needed"),
    "a source twice": ("FOLDER/twice.yaml:a", "x is a source of a and of b"),
    "no mapping": ("FOLDER/list.yaml", "no mapping of rubrics"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_rubric_is_said(name: str, tmp_path: Path) -> None:
    files = {
        "fine": "a: {evidence: x}", "key": "a: {evidance: x}", "empty": "a: {sources: [x]}", "list": "- a",
        "twice": "a: {evidence: x, sources: [x]}\nb: {trace: x, sources: [x]}",
    }  # fmt: skip
    for stem, text in files.items():
        (tmp_path / f"{stem}.yaml").write_text(text)
    choice, complaint = WRONG[name]
    asked = choice.replace("FOLDER", str(tmp_path)) if isinstance(choice, str) else choice
    with pytest.raises(ConfigError, match=complaint):
        rubric_of(sample("vstar"), asked)  # type: ignore[arg-type]  # what a config file may hold


def test_a_function_returns_a_text(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("def none(sample):\n    return None\n")
    with pytest.raises(PluginError, match="empty.py:none: it returns the rubric's text, not None"):
        rubric_of(sample("vstar"), f"{tmp_path}/empty.py:none")


class Remembers:
    """A judge that keeps the rubrics it was given."""

    async def verdict(self, question: str, evidence: str, rubric: str) -> float:
        TOLD.append(rubric)
        return 1.0


TOLD: list[str] = []


def test_what_the_judge_is_told_is_the_rubrics_text() -> None:
    async def main() -> None:
        for view in ("evidence_only", "full_trace"):
            options = {"judge": f"{__file__}:Remembers", "view": view, "accuracy": "text_match"}
            await evaluate(ScorerSpec("tapo", options).make(), played("IconQA", ("3", [])))
        await close_loop_resources()

    asyncio.run(main())
    counting = read_rubrics(BUNDLED)["counting"]
    assert load(f"{__file__}:TOLD", "list") == [counting.evidence, counting.trace]

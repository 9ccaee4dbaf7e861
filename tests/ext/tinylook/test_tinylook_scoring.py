"""What looks of tinylook are worth on CodeV's grid, from records alone; faithfulness, and looks that nothing needed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from turnwise.data.rows import as_row
from turnwise.data.samples import to_sample
from turnwise.errors import ToolError
from turnwise.ext.judge.turn_scores import box_grades
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.python_tool import PythonTool
from turnwise.ext.sandbox.zygote_process import SandboxUnavailable
from turnwise.ext.tinylook.canvas import Sizes
from turnwise.ext.tinylook.language import Puzzle, answer_text, call_text
from turnwise.ext.tinylook.look import look
from turnwise.ext.tinylook.reward import tinylook
from turnwise.ext.tinylook.rows import row_of
from turnwise.ext.tinylook.scenes import Knobs, Scene, scene_at
from turnwise.ext.tinylook.solvers import Glance, around, oracle_glances
from turnwise.reports.task_metrics import observe
from turnwise.rollout.tools.tool import ToolContext
from turnwise.scoring.scorer import Score
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Message,
    Role,
    Sample,
    StopReason,
    Text,
    ToolCall,
    Trajectory,
    Turn,
)

SIZES = Sizes()
WHOLE = Glance((0, 0, 16, 16))


def scene_and_sample(puzzle: Puzzle) -> tuple[Scene, Sample]:
    scene = scene_at("test", 0, 0, Knobs(weights={puzzle: 1.0}))
    row = row_of(scene, "test", 0, 0, SIZES)
    return scene, to_sample(as_row(row, Path("test"), 0, "test"), prompt_key="prompt")


def played(sample: Sample, glances: list[Glance], answer: str) -> Trajectory:
    """An episode with these looks, each answered by the tool itself."""

    async def work() -> list[Turn]:
        session = await look.open(ToolContext(sample, sample.tools_kwargs["look"]))
        turns = []
        for index, glance in enumerate(glances):
            call = ToolCall(f"c{index}", "look", {"box": list(glance.box)})
            call.arguments.update({"turn": glance.turn} if glance.turn else {})
            call.arguments.update({"contrast": True} if glance.contrast else {})
            said = Message(Role.ASSISTANT, call_text(glance.box, glance.turn, glance.contrast), (call,), answer="")
            turn = Turn(index, said, FinishReason.STOP, 0, 1, 1)
            try:
                result = await session.call(call.arguments)
                reply: Any = (Text(result.text), *result.images)
                turn.calls = [CallRecord(call, CallStatus.OK, 0.0, info=result.info)]
            except ToolError as error:
                reply = f"Error: {error}"
                turn.calls = [CallRecord(call, CallStatus.ERROR, 0.0)]
            turn.replies = [Message(Role.TOOL, reply, tool_call_id=call.id)]
            turns.append(turn)
        last = answer_text(answer)
        return [*turns, Turn(len(turns), Message(Role.ASSISTANT, last, answer=last), FinishReason.STOP, 0, 1, 1)]

    turns = asyncio.run(work())
    messages = [message for turn in turns for message in (turn.message, *turn.replies)]
    return Trajectory(sample, 0, 0, [*sample.prompt, *messages], turns, [], StopReason.ANSWERED, 0.0)


def scored(trajectory: Trajectory, **options: Any) -> Score:
    found = asyncio.run(tinylook(trajectory, **options))
    trajectory.reward, trajectory.parts = found.reward, dict(found.parts)
    return found


def tools(trajectory: Trajectory) -> dict[int, float]:
    return {turn: scores["tool"] for turn, scores in scored(trajectory).turns.items()}


@pytest.mark.parametrize("puzzle", sorted(set(Puzzle) - {Puzzle.NONE}))
def test_looks_of_one_who_knows_are_worth_most(puzzle: Puzzle) -> None:
    scene, sample = scene_and_sample(puzzle)
    trajectory = played(sample, oracle_glances(scene, SIZES), scene.answer)
    found = scored(trajectory)
    grades = [scores["tool"] for scores in found.turns.values()]
    assert found.parts["acc"] == found.parts["format"] == 1.0 and grades[-1] == 1.0
    assert all(grade in (1.0, 0.25) for grade in grades) and (1.0 in grades[:1] or puzzle is Puzzle.SEARCH)
    metrics = {metric.name: metric.value for metric in observe([trajectory])}
    assert metrics[f"task/tinylook/{puzzle}/faithful"] == metrics[f"task/tinylook/{puzzle}/evidence"] == 1.0
    assert metrics[f"task/tinylook/{puzzle}/looks"] == len(grades)


def test_the_grid() -> None:
    scene, sample = scene_and_sample(Puzzle.READ)
    left, upper, right, lower = scene.targets[0]
    near = Glance(around(scene.targets[0], SIZES))
    column, row = left // 16, upper // 16
    away = Glance((0 if column > 7 else 12, 0, 4 if column > 7 else 16, 4))
    assert tools(played(sample, [near], "1")) == {0: 1.0}
    assert tools(played(sample, [away], "1")) == {0: 0.25}
    far = Glance((0 if column < 8 else 8, 0 if row < 8 else 8, 8 if column < 8 else 16, 8 if row < 8 else 16))
    assert tools(played(sample, [far], "1"))[0] == 0.25, "3.5 pixels high: nothing can be read"
    low, high = max(0, column - 3), max(0, row - 3)
    small = Glance((low, high, low + 7, high + 7))  # 112 pixels: the digit is 4 high
    assert tools(played(sample, [small], "1"))[0] == 0.75
    assert tools(played(sample, [WHOLE], "1")) == {0: -0.5}, "nearly the whole canvas"
    assert tools(played(sample, [Glance((5, 5, 5, 9))], "1")) == {0: -1.0}, "nothing in it, and never mended"
    assert tools(played(sample, [Glance((5, 5, 5, 9)), near], "1")) == {0: -0.5, 1: 1.0}
    assert tools(played(sample, [near, near], "1")) == {0: 1.0, 1: -0.5}, "the same again"
    moved = Glance(
        (near.box[0], near.box[1] - 1 if near.box[1] else 1, near.box[2], near.box[3] - 1 if near.box[1] else 5)
    )
    assert tools(played(sample, [near, moved], "1")) == {0: 1.0, 1: 0.25}, "a target is paid for once"
    assert right > left and lower > upper


def test_a_turned_digit_is_higher_when_it_stands() -> None:
    seed = next(n for n in range(50) if scene_at("test", n, 0, Knobs(weights={Puzzle.ROTATE: 1.0})).turned != 180)
    scene = scene_at("test", seed, 0, Knobs(weights={Puzzle.ROTATE: 1.0}))
    row = row_of(scene, "test", seed, 0, SIZES)
    sample = to_sample(as_row(row, Path("test"), 0, "test"), prompt_key="prompt")
    (upright,) = oracle_glances(scene, SIZES)
    assert tools(played(sample, [upright], "1")) == {0: 1.0}
    assert tools(played(sample, [Glance(upright.box)], "1")) == {0: 0.75}


def test_several_targets_are_paid_for_one_by_one() -> None:
    scene, sample = scene_and_sample(Puzzle.COMPARE)
    first, second = oracle_glances(scene, SIZES)
    assert tools(played(sample, [first, second], scene.answer)) == {0: 1.0, 1: 1.0}
    assert tools(played(sample, [second], scene.answer)) == {0: 1.0}


def test_where_the_view_is_enough_a_look_only_costs() -> None:
    scene, sample = scene_and_sample(Puzzle.NONE)
    at_once, looking = played(sample, [], scene.answer), played(sample, [Glance((0, 0, 4, 4))], scene.answer)
    assert scored(at_once).reward == pytest.approx(1.3)
    assert scored(looking).reward == pytest.approx(1.3 - 0.5 * 0.25)
    metrics = [{one.name: one.value for one in observe([trajectory])} for trajectory in (at_once, looking)]
    assert [found["task/tinylook/none/needless"] for found in metrics] == [0.0, 1.0]
    assert "task/tinylook/none/faithful" not in metrics[0]


def test_a_right_guess_is_not_faithful_and_a_wrong_answer_is_not_counted() -> None:
    scene, sample = scene_and_sample(Puzzle.PRIOR)
    guessed, wrong = played(sample, [], scene.answer), played(sample, oracle_glances(scene, SIZES), "x")
    assert scored(guessed).reward == pytest.approx(1.3) and scored(wrong).parts["acc"] == 0.0
    metrics = [{one.name: one.value for one in observe([trajectory])} for trajectory in (guessed, wrong)]
    assert metrics[0]["task/tinylook/prior/faithful"] == 0.0
    assert metrics[1]["task/tinylook/prior/evidence"] == 1.0 and "task/tinylook/prior/faithful" not in metrics[1]


def test_the_reward_of_right_answers_alone() -> None:
    scene, sample = scene_and_sample(Puzzle.READ)
    trajectory = played(sample, [WHOLE], scene.answer)
    assert scored(trajectory, tool_weight=0.0).reward == pytest.approx(1.3)
    assert scored(trajectory).reward == pytest.approx(1.3 - 0.25)


def test_a_box_that_nobody_verified_is_worth_nothing() -> None:
    scene, sample = scene_and_sample(Puzzle.READ)
    trajectory = played(sample, oracle_glances(scene, SIZES), scene.answer)
    facts = trajectory.turns[0].calls[0].info["images"][0]
    for change in ({"provenance": "unverified"}, {"provenance": "contradicted"}, {"box": None}, {"matrix": [0] * 6}):
        trajectory.turns[0].calls[0].info["images"][0] = facts | change
        assert box_grades(sample, trajectory.turns[:1]) == {0: 0.0}, change
    trajectory.turns[0].calls[0].info["images"][0] = {key: facts[key] for key in ("box", "size")}
    assert box_grades(sample, trajectory.turns[:1]) == {0: 1.0}


def test_free_python_works_on_the_same_rows_and_finds_no_answer_in_its_folder() -> None:
    scene, sample = scene_and_sample(Puzzle.READ)
    left, upper, right, lower = (side * SIZES.step for side in around(scene.targets[0], SIZES))
    code = (
        "import os\nfrom PIL import Image\nimage = Image.open('canvas_0.png')\n"
        f"image.crop({(left, upper, right, lower)}).show()\n"
        "print(sorted(os.listdir('.')), sorted(os.environ), image.size, image.info)"
    )

    async def work() -> Any:
        tool = PythonTool(sandbox=SandboxConfig(preload=[]))
        try:
            try:
                await tool.start()
            except SandboxUnavailable as error:
                pytest.skip(str(error))
            session = await tool.open(ToolContext(sample, sample.tools_kwargs["python"]))
            try:
                return await session.call({"code": code})
            finally:
                await session.close()
        finally:
            await tool.stop()

    result = asyncio.run(work())
    assert "['canvas_0.png']" in result.text and "(256, 256) {}" in result.text
    turn = Turn(0, Message(Role.ASSISTANT, "x"), FinishReason.STOP, 0, 1, 1)
    turn.calls = [CallRecord(ToolCall("c", "python", {"code": code}), CallStatus.OK, 0.0, info=result.info)]
    assert box_grades(sample, [turn]) == {0: 1.0}

"""Red lines: each fires on the trace made for it, none on a clean one."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from turnwise.errors import ConfigError, ScoringFailed
from turnwise.ext.judge.tool_misuse import Penalties, ToolMisuse, misuse_by_turn
from turnwise.storage.tool_behaviour import tool_behaviour
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    Message,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)


def data_url(width: int = 100, height: int = 80) -> str:
    buffer = io.BytesIO()
    Pillow.new("RGB", (width, height)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def shown(
    box: list[float] | None, *steps: tuple[str, dict[str, Any]], source: str | None = "image_0.png"
) -> dict[str, Any]:
    """The facts of one image as the python tool records them."""
    size = [10, 10] if box is None else [int(box[2] - box[0]), int(box[3] - box[1])]
    return {"name": "show", "size": size, "source": source, "box": box,
            "steps": [{"name": name, "arguments": arguments} for name, arguments in steps]}  # fmt: skip


def crop(left: float, upper: float, right: float, lower: float) -> dict[str, Any]:
    box = [max(left, 0), max(upper, 0), min(right, 100), min(lower, 80)]
    return shown(box, ("crop", {"box": [left, upper, right, lower]}))


def call(code: str, *, status: CallStatus = CallStatus.OK, reply: str = "", images: tuple[Any, ...] = (), tool: str = "python") -> Any:  # fmt: skip
    return code, status, reply, images, tool


def episode(*calls: Any, images: tuple[Image, ...] | None = None) -> Trajectory:
    """One turn per call, then an answer."""
    turns = []
    for index, (code, status, reply, facts, name) in enumerate(calls):
        made = ToolCall(f"c{index}", name, {"code": code})
        record = CallRecord(made, status, 0.1, info={"images": list(facts)} if facts else {})
        message = Message(Role.ASSISTANT, f"<code>{code}</code>", (made,))
        said = [Message(Role.TOOL, reply, tool_call_id=made.id)]
        turns.append(Turn(index, message, FinishReason.STOP, 0, 1, 1, calls=[record], replies=said))
    turns.append(Turn(len(turns), Message(Role.ASSISTANT, "7"), FinishReason.STOP, 0, 1, 1))
    given = (Image(data_url()),) if images is None else images
    sample = Sample("s", (Message(Role.USER, "Which digit?"),), "look", "7", images=given)
    return Trajectory(sample, 0, 0, [], turns, [], StopReason.ANSWERED, 0.0)


LOOK = "show(img0.crop((10, 10, 30, 30)))"
CLEAN = episode(
    call(LOOK, images=(crop(10, 10, 30, 30),)),
    call("show(img0.crop((0, 0, 100, 40)))", images=(crop(0, 0, 100, 40),)),
    call("oops", status=CallStatus.ERROR, reply="Error: NameError"),
    call("print(img0.size)", reply="(100, 80)"),
    call("print(len(images))", reply="(100, 80)"),
)


def test_a_clean_trace_crosses_none() -> None:
    assert misuse_by_turn(CLEAN, search=True) == {}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([call(LOOK, images=(crop(-5, 0, 30, 30),))], {0: {ToolMisuse.INVALID_CROP}}),
        ([call(LOOK, images=(crop(80, 0, 120, 30),))], {0: {ToolMisuse.INVALID_CROP}}),
        ([call(LOOK, images=(shown(None, ("crop", {"box": [9, 9, 9, 20]})),))], {0: {ToolMisuse.INVALID_CROP}}),
        ([call(LOOK, reply="[an image of 0 x 20 pixels was left out]")], {0: {ToolMisuse.INVALID_CROP}}),
        (
            [call(LOOK, status=CallStatus.ERROR, reply="Error: ValueError: Coordinate 'right' is less than 'left'"),
             call("show(img0.crop((1, 1, 9, 9)))", images=(crop(1, 1, 9, 9),))],
            {0: {ToolMisuse.INVALID_CROP}},
        ),
        (
            [call(LOOK, images=(crop(10, 10, 30, 30),)), call(LOOK + "  \n\n", images=(crop(10, 10, 30, 30),))],
            {1: {ToolMisuse.DUPLICATE_CALL}},
        ),
        (
            [call(LOOK, images=(crop(10, 10, 30, 30),)), call("x = img0\n" + LOOK, images=(crop(10, 10, 30, 30),))],
            {1: {ToolMisuse.DUPLICATE_OUTPUT}},
        ),
        (
            [call("print(img0)", reply="<PIL image, 100 x 80>"), call("print(img1)", reply="<PIL image, 100 x 80>")],
            {1: {ToolMisuse.DUPLICATE_OUTPUT}},
        ),
        ([call("1 / 0", status=CallStatus.ERROR)], {0: {ToolMisuse.UNREPAIRED_ERROR}}),
        ([call("while 1: f()", status=CallStatus.TIMEOUT), call("q", tool="search")], {0: {ToolMisuse.UNREPAIRED_ERROR}}),
        ([call("print('the answer is 7')", reply="the answer is 7")], {0: {ToolMisuse.PRINT_ONLY}}),
        ([call(LOOK, images=(crop(0, 0, 100, 79),))], {0: {ToolMisuse.LARGE_CROP}}),
    ],
)  # fmt: skip
def test_each_line_fires_on_its_own_trace(calls: list[Any], expected: dict[int, set[ToolMisuse]]) -> None:
    assert misuse_by_turn(episode(*calls), search=True) == expected


def test_printing_is_no_fault_where_nothing_has_to_be_looked_for() -> None:
    assert misuse_by_turn(episode(call("print(6 * 7)", reply="42")), search=False) == {}


def test_a_call_that_could_not_be_read_is_repaired_by_any_tool_that_worked() -> None:
    broken = call("?", status=CallStatus.MALFORMED, tool="")
    assert misuse_by_turn(episode(broken, call("print(img0)")), search=True) == {}
    assert misuse_by_turn(episode(call("print(img0)"), broken), search=True) == {1: {ToolMisuse.UNREPAIRED_ERROR}}


def test_images_of_unknown_origin_and_short_texts_are_not_taken_for_equal() -> None:
    drawn = shown(None, source=None)
    assert (
        misuse_by_turn(episode(call("plot(img0)", images=(drawn,)), call("plot(img1)", images=(drawn,))), search=True)
        == {}
    )
    assert misuse_by_turn(episode(call("print(a)", reply="5"), call("print(b)", reply="5")), search=True) == {}


def test_a_whole_image_turned_or_brightened_is_no_crop() -> None:
    turned = shown([0, 0, 100, 80], ("rotate", {"angle": 180}))
    assert misuse_by_turn(episode(call("show(img0.rotate(180))", images=(turned,))), search=True) == {}


def test_crops_of_crops_are_checked_for_what_needs_no_size() -> None:
    twice = shown([20, 20, 30, 30], ("resize", {"size": [400, 320]}), ("crop", {"box": [80, 80, 120, 120]}))
    assert misuse_by_turn(episode(call(LOOK, images=(twice,))), search=True) == {}
    below = shown([0, 0, 5, 5], ("resize", {"size": [400, 320]}), ("crop", {"box": [-1, 0, 20, 20]}))
    assert misuse_by_turn(episode(call(LOOK, images=(below,))), search=True) == {0: {ToolMisuse.INVALID_CROP}}


@pytest.mark.parametrize("box", ["abc", [1, 2], [1, 2, "x", 4], [0, 0, float("nan"), 4], {"a": 1}, None])
def test_a_box_that_is_none_is_passed_over(box: Any) -> None:
    odd = shown([0, 0, 5, 5], ("crop", {"box": box}))
    assert misuse_by_turn(episode(call(LOOK, images=(odd,))), search=True) == {}


def test_the_size_may_come_from_a_file_and_a_missing_file_is_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "scene.png"
    Pillow.new("L", (50, 50)).save(path)
    facts = shown([0, 0, 50, 50], ("crop", {"box": [0, 0, 60, 50]}), source="scene.png")
    trace = episode(call(LOOK, images=(facts,)), images=(Image(str(path)),))
    assert misuse_by_turn(trace, search=True) == {0: {ToolMisuse.INVALID_CROP}}
    path.unlink()
    with pytest.raises(ScoringFailed, match="the size of image"):
        misuse_by_turn(trace, search=True)


@pytest.mark.parametrize(
    "codes",
    [
        ["print('7')", "print('7')", "x = 7\nprint(x)", "print(6 * 7)", ""],
        ["```python\nprint('7')\n```", "<code>print('7')</code>", "print('7') \n\n", "import PIL"],
        ["print(img0.size)", "print(img0.size)\n", "print('7'", "def f(x):\n    return x\nprint(f('7'))"],
        ["(" * 500, "print(" + "1" * 30_000 + ")"],
    ],
)
@pytest.mark.parametrize("status", list(CallStatus))
def test_the_board_and_the_reward_give_one_answer(codes: list[str], status: CallStatus) -> None:
    trace = episode(*(call(code, status=status) for code in codes))
    lines = misuse_by_turn(trace, search=True)
    board = tool_behaviour(trace)
    for line, count in ((ToolMisuse.PRINT_ONLY, board.print_only), (ToolMisuse.DUPLICATE_CALL, board.duplicate_calls)):
        assert sum(line in found for found in lines.values()) == count


def test_arguments_nested_too_deeply_to_compare_are_survived() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    made = episode(call("x"), call("x"))
    for turn in made.turns[:2]:
        turn.calls[0].call.arguments["code"] = deep
    assert misuse_by_turn(made, search=True) == {}


def test_penalties_are_bounded_and_named() -> None:
    chosen = Penalties.of({"print_only": -1.0, "large_crop": -0.1}, 0.9)
    assert chosen.total({ToolMisuse.LARGE_CROP}) == -0.1
    assert chosen.total({ToolMisuse.LARGE_CROP, ToolMisuse.DUPLICATE_CALL}) == pytest.approx(-0.6)
    assert chosen.total({ToolMisuse.PRINT_ONLY, ToolMisuse.DUPLICATE_CALL}) == -1.0
    with pytest.raises(ConfigError, match="unknown misuse 'printonly': did you mean 'print_only'"):
        Penalties.of({"printonly": -1.0}, 0.9)
    with pytest.raises(ConfigError, match="tool_misuse.print_only must lie between -1 and 0, not 0.5"):
        Penalties.of({"print_only": 0.5}, 0.9)
    with pytest.raises(ConfigError, match="max_crop"):
        Penalties.of({}, 0.0)

"""The calculator format: what a model may write between << and >>, and what of it is a call."""

import pytest

from turnwise.chat.formats.calculator import parse, render_call
from turnwise.types import ToolCall


def read(text: str) -> list[tuple[str | None, str | None]]:
    message = parse(text, turn=2, in_reasoning=False)
    assert all(call.name == "calculate" for call in message.tool_calls)
    return [(call.arguments.get("expression"), call.problem) for call in message.tool_calls]


def test_words_before_a_call_are_the_answer_and_the_expression_is_its_argument() -> None:
    message = parse("She sold 48/2 = $<<48/2>>", turn=2, in_reasoning=False)
    assert message.tool_calls == (ToolCall("t002c0000", "calculate", {"expression": "48/2"}),)
    assert message.answer == "She sold 48/2 = $" and message.text == "She sold 48/2 = $<<48/2>>"


def test_several_calls_of_one_turn_are_told_apart() -> None:
    assert read("<< 1+2 >>, then <<3\n*4>>") == [("1+2", None), ("3\n*4", None)]
    ids = [call.id for call in parse("<<1>><<2>>", turn=0, in_reasoning=False).tool_calls]
    assert ids == ["t000c0000", "t000c0001"]


@pytest.mark.parametrize("text", ["#### 72", "3 < 4 > 2", "1 >> 2", "", "a >> b < c"])
def test_what_opens_nothing_is_an_answer(text: str) -> None:
    assert read(text) == [] and parse(text, turn=0, in_reasoning=False).answer == text


@pytest.mark.parametrize("text", ["<<48/2", "<<48/2>", "<<<<48/2", "<<"])
def test_a_call_without_an_end_has_a_problem(text: str) -> None:
    assert all(problem and "close it with >>" in problem for _, problem in read(text)) and read(text)


def test_a_call_inside_one_that_is_not_closed_stands_alone() -> None:
    assert [expression for expression, _ in read("<<1+ <<2+3>>")] == [None, "2+3"]


def test_arguments_that_are_no_expression_are_written_as_data() -> None:
    assert render_call(ToolCall("", "other", {"x": 1})) == '<<{"x": 1}>>'
    assert read("<<>>") == [("", None)]  # the tool says what is wrong with it

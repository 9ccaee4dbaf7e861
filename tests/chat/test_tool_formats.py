"""What every tool-call format must do, tried on each file of the folder."""

from dataclasses import replace

import pytest

from turnwise.chat.calls.tool_format import ToolFormat, load_format
from turnwise.system.plugins import names_in
from turnwise.types import ToolCall

PYTHON = ToolCall("t003c0000", "python", {"code": "print(f(g({})))"})
CALLS = {"calculator": ToolCall("t003c0000", "calculate", {"expression": "(2+3)*4"})}
"""Of formats whose only tool is another one."""


@pytest.fixture(params=names_in("turnwise.chat.formats"))
def call_format(request: pytest.FixtureRequest) -> ToolFormat:
    return load_format(request.param)


@pytest.fixture
def call(request: pytest.FixtureRequest, call_format: ToolFormat) -> ToolCall:
    return CALLS.get(request.node.callspec.params["call_format"], PYTHON)


def test_a_written_call_is_read_back_and_a_malformed_one_has_a_problem(call_format: ToolFormat, call: ToolCall) -> None:
    read = call_format.parse(f"I look.\n{call_format.render_call(call)}", turn=3, in_reasoning=False)
    assert [replace(one, id=call.id) for one in read.tool_calls] == [call], "a model may name its calls itself"
    assert read.answer == "I look." and read.reasoning is None
    (broken,) = call_format.parse(call_format.render_malformed_call(call), turn=3, in_reasoning=False).tool_calls
    assert broken.problem


@pytest.mark.parametrize("is_open", [True, False])
def test_thoughts_are_set_apart_and_calls_in_them_are_none(
    call_format: ToolFormat, call: ToolCall, is_open: bool
) -> None:
    thought = call_format.render_thought(f"maybe {call_format.render_call(call)}", is_open=is_open)
    assert (call_format.THINK in thought) is not is_open and call_format.UNTHINK in thought
    read = call_format.parse(f"{thought}It is 4.", turn=0, in_reasoning=is_open)
    assert read.tool_calls == () and read.answer == "It is 4." and "maybe" in (read.reasoning or "")

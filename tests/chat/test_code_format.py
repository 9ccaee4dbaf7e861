"""The code format: which code of a turn is run, and which is not."""

import pytest

from turnwise.chat.formats import code
from turnwise.types import ToolCall


def parsed(text: str, in_reasoning: bool = False):
    return code.parse(text, turn=2, in_reasoning=in_reasoning)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("Let me see.\n<code>\nprint(1)\n</code>", "print(1)"),
        ("<code>```python\nprint(1)\n```</code>", "print(1)"),
        ("<code>a = 1</code> and <code>print(a)</code>", "a = 1\nprint(a)"),
        ("Look:\n```python\nprint(1)\n```\ndone", "print(1)"),
        ("```py\nif x:\n    y\n```\n```python\nz\n```", "if x:\n    y\nz"),
        ("<code>s = '''\n    indented\n'''</code>", "s = '''\n    indented\n'''"),
        ("<code>x = '```'</code>", "x = '```'"),
    ],
)
def test_all_blocks_of_a_turn_are_one_program(text: str, program: str) -> None:
    message = parsed(text)
    assert [call.arguments for call in message.tool_calls] == [{"code": program}]
    assert message.tool_calls[0].name == "python" and message.tool_calls[0].problem is None
    assert message.text == text


@pytest.mark.parametrize(
    "text",
    ["no code", "```\nprint(1)\n```", "```json\n{}\n```", "<answer>4</answer> <code>print(4)</code>", "inline `x`"],
)
def test_what_is_not_a_program_is_not_run(text: str) -> None:
    assert parsed(text).tool_calls == ()


def test_code_without_an_end_is_a_malformed_call() -> None:
    for text in ("<code>print(1)", "```python\nprint(1)", "<code>a</code><code>b"):
        (call,) = parsed(text).tool_calls
        assert call.problem is not None and "no end" in call.problem


def test_code_in_a_thought_is_not_run() -> None:
    message = parsed("<think>maybe <code>rm()</code></think>It is 4.")
    assert message.tool_calls == () and message.answer == "It is 4." and "rm()" in (message.reasoning or "")
    assert parsed("so <code>x</code></think><code>y</code>", in_reasoning=True).tool_calls[0].arguments == {"code": "y"}
    assert parsed("stray <code>x</code></think><code>y</code>").tool_calls[0].arguments == {"code": "y"}
    assert parsed("<think>never closed <code>x</code>").tool_calls == ()


def test_a_rendered_call_is_read_back() -> None:
    call = ToolCall("t002c0000", "python", {"code": "a = 1\nprint(a)"})
    assert parsed(code.render_call(call)).tool_calls == (call,)

"""The code format: Python between <code> tags, or else in fenced blocks, is a call of the `python` tool.

All blocks of a turn are one program. A turn with an <answer> is final: code beside it is not run.
"""

import json
from collections.abc import Sequence

from turnwise.chat.calls.reasoning import ANSWER as ANSWER
from turnwise.chat.calls.reasoning import CALL_ENDS as CALL_ENDS
from turnwise.chat.calls.reasoning import STOPS as STOPS
from turnwise.chat.calls.reasoning import THINK as THINK
from turnwise.chat.calls.reasoning import UNTHINK as UNTHINK
from turnwise.chat.calls.reasoning import render_thought as render_thought
from turnwise.chat.calls.reasoning import split_thoughts
from turnwise.errors import TemplateError
from turnwise.system.code_blocks import PYTHON, CodeBlock, code_blocks
from turnwise.types import JsonSchema, Message, Role, ToolCall

TOOL = "python"


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text. Code the model only thinks about is never run."""
    thoughts, rest = split_thoughts(text, in_reasoning)
    # A fence that names no language may hold anything.
    blocks = [block for block in code_blocks(rest) if block.language and block.language in PYTHON]
    calls: tuple[ToolCall, ...] = ()
    if blocks and "<answer>" not in rest:
        calls = (_call(blocks, f"t{turn % 1000:03d}c0000"),)
    return Message(
        Role.ASSISTANT,
        text,
        calls,
        reasoning="\n".join(thoughts) if thoughts else None,
        answer=_without(rest, blocks).strip(),
    )


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    code = call.arguments.get("code", json.dumps(call.arguments))  # only code can be written; anything else is data
    if "</code>" in str(code) or "<answer>" in str(code):
        raise TemplateError("chat.tool_format=code: code with </code> or <answer> in it cannot be written")
    return f"<code>\n{code}\n</code>"


def render_malformed_call(call: ToolCall) -> str:
    """The text of a call whose closing tag is missing."""
    return render_call(call).removesuffix("</code>")


def _call(blocks: list[CodeBlock], call_id: str) -> ToolCall:
    if not blocks[-1].is_closed:
        return ToolCall(call_id, TOOL, {}, "the code has no end: close it with </code>, or ``` after a fence")
    return ToolCall(call_id, TOOL, {"code": "\n".join(block.code for block in blocks)})


def _without(text: str, blocks: list[CodeBlock]) -> str:
    pieces, position = [], 0
    for block in blocks:
        pieces.append(text[position : block.start])
        position = block.end
    return "".join([*pieces, text[position:]])

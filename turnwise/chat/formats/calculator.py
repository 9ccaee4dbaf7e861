"""The calculator format: an expression between << and >> is a call of the `calculate` tool, as GSM8K writes it.

A call costs a small model a few tokens instead of thirty. The words around it are the reasoning.
"""

import json
import re
from collections.abc import Sequence

from turnwise.chat.calls.reasoning import ANSWER as ANSWER
from turnwise.chat.calls.reasoning import CALL_ENDS as CALL_ENDS
from turnwise.chat.calls.reasoning import STOPS as STOPS
from turnwise.chat.calls.reasoning import THINK as THINK
from turnwise.chat.calls.reasoning import UNTHINK as UNTHINK
from turnwise.chat.calls.reasoning import render_thought as render_thought
from turnwise.chat.calls.reasoning import split_thoughts
from turnwise.errors import TemplateError
from turnwise.types import JsonSchema, Message, Role, ToolCall

TOOL, ARGUMENT = "calculate", "expression"
OPEN, CLOSE = "<<", ">>"
_CALL = re.compile(r"<<(.*?)(?:(>>)|(?=<<)|\Z)", re.DOTALL)


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text. What the model only thinks about is never calculated."""
    thoughts, rest = split_thoughts(text, in_reasoning)
    expressions = [(match[1], match[2] is not None) for match in _CALL.finditer(rest)]
    calls = tuple(_call(*expression, f"t{turn % 1000:03d}c{n % 10000:04d}") for n, expression in enumerate(expressions))
    reasoning = "\n".join(thoughts) if thoughts else None
    answer = _CALL.sub("", rest) if expressions else rest
    return Message(Role.ASSISTANT, text, calls, reasoning=reasoning, answer=answer.strip())


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    # Only expressions can be written; anything else is data.
    expression = str(call.arguments.get(ARGUMENT, json.dumps(call.arguments)))
    if OPEN in expression or CLOSE in expression:
        raise TemplateError(f"chat.tool_format=calculator: an expression with {OPEN} or {CLOSE} cannot be written")
    return f"{OPEN}{expression}{CLOSE}"


def render_malformed_call(call: ToolCall) -> str:
    """The text of a call whose closing mark is missing."""
    return render_call(call).removesuffix(CLOSE)


def _call(expression: str, closed: bool, call_id: str) -> ToolCall:
    if not closed:
        return ToolCall(call_id, TOOL, {}, f"the expression has no end: close it with {CLOSE}")
    return ToolCall(call_id, TOOL, {ARGUMENT: expression.strip()})

"""The hermes tool-call format: JSON inside <tool_call> tags, reasoning inside <think> tags.

    <tool_call>
    {"name": "search", "arguments": {"query": "tides"}}
    </tool_call>

Of Hermes, Qwen2.5, Qwen3 and many others.
"""

import json
import re
from collections.abc import Sequence

from turnwise.chat.calls.json_calls import JsonBefore, call_of
from turnwise.chat.calls.reasoning import ANSWER as ANSWER
from turnwise.chat.calls.reasoning import CALL_ENDS as CALL_ENDS
from turnwise.chat.calls.reasoning import STOPS as STOPS
from turnwise.chat.calls.reasoning import THINK as THINK
from turnwise.chat.calls.reasoning import UNTHINK as UNTHINK
from turnwise.chat.calls.reasoning import render_thought as render_thought
from turnwise.chat.calls.scanning import FoundCall, Piece, Scanner
from turnwise.types import JsonSchema, Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BODY = JsonBefore((CLOSE, OPEN, THINK, UNTHINK), keeps_strings=False)


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    return _SCANNER.message(text, turn=turn, in_reasoning=in_reasoning)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


def render_malformed_call(call: ToolCall) -> str:
    """The call with its braces not all closed."""
    return render_call(call).replace("}}", "}")


def _read(text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
    body = _BODY.read(text, mark.end())
    if body.mark != CLOSE:  # another call or a thought begins inside this one
        return [FoundCall("", {}, f"the call has no {CLOSE}")], body.stop
    if body.problem is not None:
        return [FoundCall("", {}, f"the call is not valid JSON: {body.problem}")], body.end
    return [call_of(body.value)], body.end


_SCANNER = Scanner(OPEN, _read)

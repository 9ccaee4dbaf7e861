"""The kimi format: JSON after an id that names the tool, all calls of a turn in one section.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>
    {"query": "tides"}<|tool_call_end|><|tool_calls_section_end|>

Of Kimi K2. The id that the model wrote is the id of the call: its template shows it with the tool's reply.
"""

import json
import re
from collections.abc import Sequence

from turnwise.chat.calls.json_calls import JsonBefore, call_with
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK, render_thought  # noqa: F401
from turnwise.chat.calls.scanning import FoundCall, Piece, Scanner, any_of, refuse_unless_read_back
from turnwise.types import JsonSchema, Message, ToolCall

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_MARKS = (SECTION, SECTION_END, OPEN, ARGUMENTS, CLOSE)
_ID = re.compile(r"\s*((?:functions\.)?([^\s<>:|]+?)(?::(\d{1,9}))?)\s*" + re.escape(ARGUMENTS))
_BODY = JsonBefore((*_MARKS, THINK, UNTHINK))
_NEXT = re.compile(any_of((*_MARKS, THINK, UNTHINK)) + r"|\Z")
_OURS = re.compile(r"t\d{3}c(\d{4})")


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    return _SCANNER.message(text, turn=turn, in_reasoning=in_reasoning)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call, in a section of its own."""
    ours = _OURS.fullmatch(call.id)
    number = call.id.rpartition(":")[2]
    number = str(int(ours[1])) if ours else number if number.isdecimal() else "0"
    body = json.dumps(call.arguments, ensure_ascii=False)
    text = f"{SECTION}{OPEN}functions.{call.name}:{number}{ARGUMENTS}{body}{CLOSE}{SECTION_END}"
    return refuse_unless_read_back(text, call, parse(text, turn=0, in_reasoning=False).tool_calls, "kimi")


def render_malformed_call(call: ToolCall) -> str:
    """The call with a brace too few."""
    return render_call(call).replace("}" + CLOSE, CLOSE)


def _read(text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
    if mark.group() != OPEN:  # the section's own marks say nothing; one that is never closed holds its calls still
        return [], mark.end()
    named = _ID.match(text, mark.end())
    if named is None:
        following = _NEXT.search(text, mark.end())
        assert following is not None  # \Z matches at the latest
        return [FoundCall("", {}, f"after {OPEN} comes functions.NAME:NUMBER{ARGUMENTS}")], following.start()
    body = _BODY.read(text, named.end())
    if body.mark != CLOSE:
        return [FoundCall(named[2], {}, f"the call has no {CLOSE}")], body.stop
    if body.problem is not None:
        return [FoundCall(named[2], {}, f"the arguments are not valid JSON: {body.problem}")], body.end
    call = call_with(named[2], body.value)
    return [FoundCall(call.name, call.arguments, call.problem, named[1])], body.end


_SCANNER = Scanner(any_of(_MARKS), _read)

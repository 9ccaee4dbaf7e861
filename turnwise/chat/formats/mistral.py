"""The mistral format: the tool's name and JSON after a mark, or a list of calls in JSON.

    [TOOL_CALLS]search[ARGS]{"query": "tides"}
    [TOOL_CALLS][{"name": "search", "arguments": {"query": "tides"}}]

Of Mistral's models; the first since version 11 of its tokenizer, the second before. Both are read, the first is
written. Nothing may follow a call but another one.
"""

import json
import re
from collections.abc import Sequence

from turnwise.chat.calls.json_calls import JsonBefore, call_of, call_with
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, thought_text  # noqa: F401
from turnwise.chat.calls.scanning import FoundCall, Piece, Scanner, refuse_unless_read_back
from turnwise.types import JsonSchema, Message, ToolCall

THINK, UNTHINK = "[THINK]", "[/THINK]"
_THOUGHTS = {THINK: UNTHINK, "<think>": "</think>"}
"""The second of the models before them."""
OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}\"]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\]|(?=\s*\{))")
_BODY = JsonBefore((OPEN, *_THOUGHTS, *_THOUGHTS.values()))


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    return _SCANNER.message(text, turn=turn, in_reasoning=in_reasoning)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    text = f"{OPEN}{call.name}{ARGUMENTS}{json.dumps(call.arguments, ensure_ascii=False)}"
    return refuse_unless_read_back(text, call, parse(text, turn=0, in_reasoning=False).tool_calls, "mistral")


def render_malformed_call(call: ToolCall) -> str:
    """The call with a brace too few."""
    return render_call(call)[:-1]


def render_thought(thought: str, *, is_open: bool) -> str:
    """The text of a thought; `is_open` when the prompt opened it."""
    return thought_text(thought, THINK, UNTHINK, is_open=is_open)


def _read(text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
    named = _NAMED.match(text, mark.end())
    body = _BODY.read(text, named.end() if named else mark.end())
    if body.problem is not None:
        name = named[1] if named else ""
        return [FoundCall(name, {}, f"the call is not valid JSON: {body.problem}")], body.stop
    if named:
        return [call_with(named[1], body.value)], body.stop
    if not isinstance(body.value, list) or not body.value:
        return [FoundCall("", {}, f"after {OPEN} comes NAME{ARGUMENTS} and an object, or a list of calls")], body.stop
    return [call_of(item) for item in body.value], body.stop


_SCANNER = Scanner(re.escape(OPEN), _read, _THOUGHTS)

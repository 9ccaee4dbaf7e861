"""The llama3_json format: an object with the tool's name and its parameters, at the beginning of a line.

    {"name": "search", "parameters": {"query": "tides"}}

Of Llama 3.1 and later. <|python_tag|> may stand before it, several are parted by ";" or new lines. An object that
has no name and parameters is an answer.
"""

import json
import re
from collections.abc import Sequence

from turnwise.chat.calls.json_calls import JsonBefore, call_of, decode
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, THINK, UNTHINK, render_thought  # noqa: F401
from turnwise.chat.calls.scanning import FoundCall, Piece, Scanner, refuse_unless_read_back
from turnwise.types import JsonSchema, Message, ToolCall

TAG = "<|python_tag|>"
LINE = r'(?:(?m:^)|(?<=</think>))[ \t]*(?=\{\s*"(?:name|type|parameters|arguments)"\s*:)'
"""Where an object begins that may be a call."""
_OBJECT = re.compile(LINE)
_CALL = re.compile(r'\{\s*"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:parameters|arguments)"\s*:')
"""The beginning of what can only be a call."""
_BETWEEN = re.compile(r"[\s;,]*")
_BODY = JsonBefore((TAG, THINK, UNTHINK))


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    return _SCANNER.message(text, turn=turn, in_reasoning=in_reasoning)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    text = json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
    return refuse_unless_read_back(text, call, parse(text, turn=0, in_reasoning=False).tool_calls, "llama3_json")


def render_malformed_call(call: ToolCall) -> str:
    """The call with a brace too few."""
    return render_call(call)[:-1]


def read_objects(text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
    """All objects up to the next mark, and the words between them."""
    stop = (_BODY.span(text, mark.end()) or (len(text),))[0]
    tagged, body, position, pieces = mark.group() == TAG, text[mark.end() : stop], 0, list[Piece]()
    while (position := _BETWEEN.match(body, position).end()) < len(body):  # type: ignore[union-attr]  # never None
        if body[position] != "{":
            if tagged and not pieces:
                pieces.append(FoundCall("", {}, f'after {TAG} comes {{"name": ..., "parameters": {{...}}}}'))
            following = _OBJECT.search(body, position)
            pieces.append(body[position : following.start() if following else None])
            if following is None:
                break
            position = following.end()
        try:
            value, end = decode(body, position)
        except (ValueError, RecursionError) as error:
            called = tagged or _CALL.match(body, position)
            problem = FoundCall("", {}, f"the call is not valid JSON: {error}")
            pieces.append(problem if called else body[position:])
            break
        pieces.append(_call(value) if tagged or _is_call(value) else body[position:end])
        position = end
    return pieces, stop


def _is_call(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and _key(value) in value


def _call(value: object) -> FoundCall:
    return call_of(value, _key(value) if isinstance(value, dict) else "parameters")


def _key(value: dict[str, object]) -> str:
    return "arguments" if "arguments" in value and "parameters" not in value else "parameters"


_SCANNER = Scanner(rf"{re.escape(TAG)}|{LINE}", read_objects)

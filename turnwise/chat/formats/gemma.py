"""The gemma format: a call in Gemma's own notation, its texts between marks instead of quotes.

    <|tool_call>call:search{query:<|"|>tides<|"|>,limit:3}<tool_call|>

Of Gemma 4; objects and lists are written in the same way. What a word without marks means is JSON where it parses, else
text. The token that opens the tool's reply ends the turn.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from turnwise.chat.calls.json_calls import DEEPEST, load
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, thought_text  # noqa: F401
from turnwise.chat.calls.scanning import FoundCall, Piece, Scanner, any_of, refuse_unless_read_back
from turnwise.errors import TemplateError
from turnwise.types import JsonSchema, Message, ToolCall

THINK, UNTHINK = "<|channel>thought", "<channel|>"
OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
STOPS = ("<|tool_response>",)
_NAME = re.compile(r"\s*call:([^\s{}<>:]+)\s*(?=\{)")
_SPACE = re.compile(r"\s*")
_KEY = re.compile(rf'\s*(?:([^\s:,{{}}\[\]<>"]+)|{re.escape(QUOTE)}([^<]*){re.escape(QUOTE)})\s*:\s*')
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_TEXT_END = re.compile(any_of((QUOTE, OPEN, CLOSE)))
_BARE = re.compile(r"[^,{}\[\]<>\n]+")
_CLOSES = re.compile(rf"\s*{re.escape(CLOSE)}")
_RECOVERS = re.compile(rf"{re.escape(CLOSE)}|(?={any_of((OPEN, THINK, UNTHINK))})|\Z")


class _Unreadable(Exception):
    def __init__(self, problem: str, at: int) -> None:
        super().__init__(problem)
        self.at = at


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    return _SCANNER.message(text, turn=turn, in_reasoning=in_reasoning)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    text = f"{OPEN}call:{call.name}{_written(call.arguments)}{CLOSE}"
    return refuse_unless_read_back(text, call, parse(text, turn=0, in_reasoning=False).tool_calls, "gemma")


def render_malformed_call(call: ToolCall) -> str:
    """The call with a brace too few."""
    return render_call(call).removesuffix("}" + CLOSE) + CLOSE


def render_thought(thought: str, *, is_open: bool) -> str:
    """The text of a thought; `is_open` when the prompt opened it."""
    return thought_text(thought, THINK, UNTHINK, is_open=is_open).rstrip("\n")  # what follows stands right after it


def _read(text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
    name, position = "", mark.end()
    try:
        named = _NAME.match(text, position)
        if named is None:
            raise _Unreadable(f"after {OPEN} comes call:NAME{{...}}", position)
        name = named[1]
        arguments, position = _value(text, named.end(), 0)
        closed = _CLOSES.match(text, position)
        if closed is None:
            raise _Unreadable(f"the call has no {CLOSE}", position)
        return [FoundCall(name, arguments)], closed.end()
    except _Unreadable as error:
        end = _RECOVERS.search(text, error.at)
        assert end is not None  # \\Z matches at the latest
        return [FoundCall(name, {}, str(error))], end.end()


def _value(text: str, position: int, depth: int) -> tuple[Any, int]:
    """The value that begins here, and where it ends."""
    if depth >= DEEPEST:
        raise _Unreadable(f"nested more than {DEEPEST} deep", position)
    if text.startswith(QUOTE, position):
        end = _TEXT_END.search(text, position + len(QUOTE))
        if end is None or end.group() != QUOTE:
            raise _Unreadable(f"a text has no end: close it with {QUOTE}", position if end is None else end.start())
        return text[position + len(QUOTE) : end.start()], end.end()
    if text.startswith(("{", "["), position):
        return _items(text, position, depth)
    bare = _BARE.match(text, position)
    if bare is None:
        raise _Unreadable("a value is missing", position)
    try:
        return load(bare.group()), bare.end()
    except (ValueError, RecursionError):
        return bare.group().strip(), bare.end()


def _items(text: str, position: int, depth: int) -> tuple[Any, int]:
    """Reads an object or a list: its value, and where the text goes on behind it."""
    is_object = text[position] == "{"
    closing, members, values = "}" if is_object else "]", dict[str, Any](), list[Any]()
    position = _skip(text, position + 1)
    while not text.startswith(closing, position):
        if is_object:
            key = _KEY.match(text, position)
            if key is None or (key[1] or key[2] or "") in members:
                raise _Unreadable("an object needs key:value, each key once", position)
            members[key[1] or key[2] or ""], position = _value(text, key.end(), depth + 1)
        else:
            value, position = _value(text, position, depth + 1)
            values.append(value)
        position = _skip(text, position)
        if text.startswith(",", position):
            position = _skip(text, position + 1)
        elif not text.startswith(closing, position):
            raise _Unreadable(f"the arguments are not closed: {closing} is missing", position)
    return members if is_object else values, position + 1


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _written(value: Any, depth: int = 0) -> str:
    if depth > DEEPEST:
        raise TemplateError(f"chat.tool_format=gemma: a value is nested more than {DEEPEST} deep")
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        keys = {key: key if _PLAIN_KEY.fullmatch(key) else f"{QUOTE}{key}{QUOTE}" for key in value}
        return "{" + ",".join(f"{keys[key]}:{_written(item, depth + 1)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(item, depth + 1) for item in value) + "]"
    return json.dumps(value)


_SCANNER = Scanner(re.escape(OPEN), _read, {THINK: UNTHINK})

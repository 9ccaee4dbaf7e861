"""The hermes tool-call format: JSON inside <tool_call> tags, reasoning inside <think> tags."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from turnwise.chat.thoughts import CALL_ENDS as CALL_ENDS
from turnwise.chat.thoughts import STOPS as STOPS
from turnwise.chat.thoughts import THINK as THINK
from turnwise.chat.thoughts import UNTHINK as UNTHINK
from turnwise.chat.thoughts import render_thought as render_thought
from turnwise.types import JsonSchema, Message, Role, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
DEEPEST = 200
"""Levels of nesting a call may have; what reads it later should never meet Python's own limit."""
_TAG = re.compile(r"</?think>|<tool_call>")
_BLOCK_END = re.compile(r"</tool_call>|(?=<tool_call>|</?think>)|\Z")
_STRING_OR_TAG = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\\]|</?(?:tool_call|think)>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Block:
    """What stands between the tags of a call; `value` where finding its end has read it already."""

    body: str
    closed: bool
    value: Any = None


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text.

    Reasoning is set apart first, so a call the model only considers is never run. `in_reasoning` says that the prompt
    already opened the <think> block.
    """
    thoughts, rest = _scan(text, in_reasoning)
    blocks = [piece for piece in rest if isinstance(piece, _Block)]
    # Nine letters and digits: some templates accept no other form of id.
    calls = tuple(_read_call(block, f"t{turn % 1000:03d}c{n % 10000:04d}") for n, block in enumerate(blocks))
    answer = "".join(piece for piece in rest if isinstance(piece, str)).strip()
    reasoning = "\n".join(thoughts) if thoughts else None
    return Message(Role.ASSISTANT, text, calls, reasoning=reasoning, answer=answer)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


def render_malformed_call(call: ToolCall) -> str:
    """The call with its braces not all closed."""
    return render_call(call).replace("}}", "}")


def _scan(text: str, in_reasoning: bool) -> tuple[list[str], list[str | _Block]]:
    """(thoughts, everything else in order). A thought that is never closed goes on to the end."""
    thoughts: list[str] = []
    rest: list[str | _Block] = []
    position = spoken = kept = 0  # `spoken` and `kept`: where the words since the last thought begin in text and rest
    thinking = in_reasoning and not text.lstrip().startswith(THINK)
    while thinking or position < len(text):
        if thinking:
            end = text.find(UNTHINK, position)
            thoughts.append(text[position : end if end >= 0 else None].strip())
            position = spoken = end + len(UNTHINK) if end >= 0 else len(text)
            kept, thinking = len(rest), False
            continue
        tag = _TAG.search(text, position)
        rest.append(text[position : tag.start() if tag else None])
        if tag is None:
            break
        position = tag.end()
        if tag.group() == OPEN:
            block, position = _read_block(text, position)
            rest.append(block)
        elif tag.group() == UNTHINK:  # closed without being opened: all since the last thought was thought
            thoughts.append(text[spoken : tag.start()].strip())
            del rest[kept:]
            spoken = position
        else:
            thinking = True
    return thoughts, rest


def _read_block(text: str, start: int) -> tuple[_Block, int]:
    """The block that begins here, and where it ends. Tags inside the strings of valid JSON are only text."""
    for match in _STRING_OR_TAG.finditer(text, start):
        found = match.group()
        if found == CLOSE:
            body = text[start : match.start()]
            try:
                return _Block(body, closed=True, value=_load(body)), match.end()
            except (ValueError, RecursionError):
                pass  # the tag may stand inside a string that is not closed
        if not (found.startswith('"') and len(found) > 1):
            break
    end = _BLOCK_END.search(text, start)
    assert end is not None  # \Z matches at the latest
    return _Block(text[start : end.start()], closed=end.group() == CLOSE), end.end()


def _read_call(block: _Block, call_id: str) -> ToolCall:
    if not block.closed:
        return ToolCall(call_id, "", {}, f"the call has no {CLOSE}")
    try:
        value = _load(block.body) if block.value is None else block.value
    except (ValueError, RecursionError) as error:
        return ToolCall(call_id, "", {}, f"the call is not valid JSON: {error}")
    if not isinstance(value, dict):
        return ToolCall(call_id, "", {}, 'the call must be an object like {"name": ..., "arguments": {...}}')
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCall(call_id, "", {}, 'the call has no "name"')
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        try:
            arguments = _load(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(call_id, name, {}, f'"arguments" is not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return ToolCall(call_id, name, {}, '"arguments" must be an object')
    return ToolCall(call_id, name, arguments)


def _load(text: str) -> Any:
    """Strict JSON: no NaN, and nothing that could be neither stored nor sent to a tool."""
    value = _JSON.decode(text)
    level, depth = [value], 0
    if text.count("{") + text.count("[") < DEEPEST:  # the usual case needs no walk
        level = []
    while level := [item for one in level if isinstance(one, (dict, list)) for item in _items(one)]:
        depth += 1
        if depth >= DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate raises a UnicodeEncodeError, a ValueError
    return value


def _items(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)

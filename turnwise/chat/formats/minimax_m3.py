"""The minimax_m3 format: tags named as the parameters, each after a mark of its own, lists and objects in tags again.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="search">]<]minimax[>[<query>tides]<]minimax[>[</query>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

Of MiniMax-M3; its thoughts stand between <mm:think> tags. The items of a list are called <item>. What cannot be told
apart in tags (an empty list, a text like 42 inside an object) is written as JSON, which is read too.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from turnwise.chat.calls.argument_types import parameters_of, typed_value, types_of
from turnwise.chat.calls.json_calls import DEEPEST
from turnwise.chat.calls.reasoning import ANSWER, CALL_ENDS, STOPS, thought_text  # noqa: F401
from turnwise.chat.calls.scanning import FoundCall, Piece, Scanner, any_of, refuse_unless_read_back
from turnwise.types import JsonSchema, Message, ToolCall

THINK, UNTHINK = "<mm:think>", "</mm:think>"
MARK = "]<]minimax[>["
OPEN, CLOSE = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
ITEM = "item"
_INVOKE = re.compile(rf'\s*{re.escape(MARK)}<invoke name="([^\s<>"]+)">')
_CLOSES = re.compile(rf"\s*{re.escape(CLOSE)}")
_TAG = re.compile(rf"{re.escape(MARK)}<(/?)([^\s<>/]+)>")
_NAME = re.compile(r"[^\s<>/\]\[]+")
_RECOVERS = re.compile(rf"{re.escape(CLOSE)}|(?={any_of((OPEN, THINK, UNTHINK))})|\Z")
Node = str | list[tuple[str, "Node"]]
"""What stands in a tag: text, or other tags by name."""


class _Unreadable(Exception):
    def __init__(self, problem: str, at: int) -> None:
        super().__init__(problem)
        self.at = at


def parse(text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
    """The assistant message in a completion's text."""
    return _SCANNER.message(text, turn=turn, in_reasoning=in_reasoning, tools=tools)


def render_call(call: ToolCall) -> str:
    """The text a model writes to make this call."""
    inside = [(key, _node(value)) for key, value in call.arguments.items()]
    text = f'{OPEN}\n{MARK}<invoke name="{call.name}">{_written(inside)}{MARK}</invoke>\n{CLOSE}'
    try:
        blocks, end = _block(text, len(OPEN))
        read = [FoundCall(name, dict(node) if isinstance(node, list) else {}) for name, node in blocks]
        read = read if end == len(text) else []
    except _Unreadable as error:
        read = [FoundCall(call.name, {}, str(error))]
    # As they stand there: what a schema makes of a text is the schema's affair.
    refuse_unless_read_back(text, ToolCall(call.id, call.name, dict(inside)), read, "minimax_m3")
    return text


def render_malformed_call(call: ToolCall) -> str:
    """The text of a call whose closing tag is missing."""
    return render_call(call).removesuffix(CLOSE)


def render_thought(thought: str, *, is_open: bool) -> str:
    """The text of a thought; `is_open` when the prompt opened it."""
    return thought_text(thought, THINK, UNTHINK, is_open=is_open)


def _read(text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
    try:
        blocks, end = _block(text, mark.end())
        return [_call(name, node, tools, end) for name, node in blocks], end
    except _Unreadable as error:
        stop = _RECOVERS.search(text, error.at)
        assert stop is not None  # \Z matches at the latest
        return [FoundCall("", {}, str(error))], stop.end()


def _block(text: str, position: int) -> tuple[list[tuple[str, Node]], int]:
    """(name, what stands in it) of every call of a block, and where it ends."""
    blocks = list[tuple[str, Node]]()
    while call := _INVOKE.match(text, position):
        node, position = _inside(text, call.end(), "invoke", 0)
        blocks.append((call[1], node))
    closed = _CLOSES.match(text, position)
    if closed is None or not blocks:
        raise _Unreadable(
            f"the calls have no {CLOSE}" if blocks else f'after {OPEN} comes <invoke name="NAME">', position
        )
    return blocks, closed.end()


def _inside(text: str, position: int, name: str, depth: int) -> tuple[Node, int]:
    """What stands up to the end of the tag `name`."""
    if depth >= DEEPEST:
        raise _Unreadable(f"nested more than {DEEPEST} deep", position)
    inside = list[tuple[str, Node]]()
    while True:
        stop = text.find(MARK, position)
        tag = _TAG.match(text, stop) if stop >= 0 else None
        if tag is None:
            raise _Unreadable(f"{name!r} has no {MARK}</{name}>", position if stop < 0 else stop)
        words = text[position:stop]
        if tag[1] and tag[2] != name:
            raise _Unreadable(f"{name!r} has no {MARK}</{name}>", stop)
        if not (tag[1] and not inside) and words.strip():
            raise _Unreadable(f"{name!r} holds words and tags", stop)
        if tag[1]:
            return inside or words, tag.end()
        node, position = _inside(text, tag.end(), tag[2], depth + 1)
        inside.append((tag[2], node))


def _call(name: str, node: Node, tools: Sequence[JsonSchema], at: int) -> FoundCall:
    parameters = parameters_of(name, tools)
    if isinstance(node, str):
        return FoundCall(name, {}, "parameters stand in tags of their names" if node.strip() else None)
    return FoundCall(name, _object(node, parameters, parameters, at))


def _object(inside: list[tuple[str, Node]], schema: JsonSchema, parameters: JsonSchema, at: int) -> dict[str, Any]:
    properties, members = schema.get("properties") or {}, dict[str, Any]()
    for key, node in inside:
        if key in members:
            raise _Unreadable(f"parameter {key!r} is given twice", at)
        members[key] = _value(node, properties.get(key), parameters, at)
    return members


def _value(node: Node, schema: Any, parameters: JsonSchema, at: int) -> Any:
    types, schema = types_of(schema, parameters), schema if isinstance(schema, dict) else {}
    if isinstance(node, str):
        empty: dict[frozenset[str], Any] = {frozenset({"array"}): [], frozenset({"object"}): {}}
        return empty[types] if not node and types in empty else typed_value(node, types)
    if types != {"object"} and all(key == ITEM for key, _ in node):
        return [_value(item, schema.get("items"), parameters, at) for _, item in node]
    return _object(node, schema, parameters, at)


def _node(value: Any) -> Node:
    """A value in tags, where reading them without a schema gives the same value; else as text."""
    if isinstance(value, str):
        return value
    if value and isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else [(ITEM, item) for item in value]
        inside: Node = [(key, _node(item)) for key, item in items]
        named = all(_NAME.fullmatch(key) for key, _ in items)
        if named and MARK not in _json(value) and _json(_value(inside, None, {}, 0)) == _json(value):
            return inside
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _written(node: Node) -> str:
    if isinstance(node, str):
        return node
    return "".join(f"{MARK}<{key}>{_written(child)}{MARK}</{key}>" for key, child in node)


_SCANNER = Scanner(re.escape(OPEN), _read, {THINK: UNTHINK})

"""Calls in JSON between marks, several in one block: one reader and writer for every family that has its own marks."""

import json
import re
from collections.abc import Sequence
from typing import Any

from turnwise.chat.calls.json_calls import JsonBefore, call_of, decode, load
from turnwise.chat.calls.reasoning import THINK, UNTHINK
from turnwise.chat.calls.scanning import FoundCall, Piece, Scanner, any_of, refuse_unless_read_back
from turnwise.types import JsonSchema, Message, ToolCall

_SPACE = re.compile(r"\s*")


class JsonBlock:
    """The marks of one family, what opens and closes calls; those that nothing closes end with the turn."""

    def __init__(self, form: str, marks: Sequence[tuple[str, str]], *, is_list: bool = True) -> None:
        """`marks`: the first as they are written. `is_list`: the calls are a list in JSON, else one follows another."""
        self.form, self._marks, self._is_list = form, dict(marks), is_list
        self._body = JsonBefore((*(mark for pair in marks for mark in pair if mark), THINK, UNTHINK))
        self._scanner = Scanner(any_of(self._marks), self.read)

    def parse(self, text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
        """The assistant message in a completion's text."""
        return self._scanner.message(text, turn=turn, in_reasoning=in_reasoning)

    def render_call(self, call: ToolCall) -> str:
        """The text a model writes to make this call."""
        opened, closed = next(iter(self._marks.items()))
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        text = f"{opened}[{body}]{closed}" if self._is_list else f"{opened}\n{body}\n{closed}"
        return refuse_unless_read_back(text, call, self.parse(text, turn=0, in_reasoning=False).tool_calls, self.form)

    def render_malformed_call(self, call: ToolCall) -> str:
        """The call with its last brace missing."""
        before, _, after = self.render_call(call).rpartition("}")
        return before + after

    def read(self, text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
        """The calls after one of the marks that open a block, and where they end."""
        closed = self._marks[mark.group()]
        body = self._body.read(text, mark.end())
        end = body.end if closed and body.mark == closed else body.stop
        if closed and body.mark != closed:
            return [FoundCall("", {}, f"the calls have no {closed}")], end
        try:
            values = self._values(text[mark.end() : body.stop])
        except (ValueError, RecursionError) as error:
            return [FoundCall("", {}, f"the calls are not valid JSON: {error}")], end
        if not isinstance(values, list) or not values:
            return [FoundCall("", {}, f"after {mark.group()} comes {self._shape}")], end
        return [call_of(value) for value in values], end

    @property
    def _shape(self) -> str:
        call = '{"name": ..., "arguments": {...}}'
        return f"a list of calls like [{call}]" if self._is_list else f"a call like {call}"

    def _values(self, text: str) -> Any:
        if self._is_list:
            return load(text)
        values, position = [], _skip(text, 0)
        while position < len(text):
            value, position = decode(text, position)
            values.append(value)
            position = _skip(text, position)
        return values


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position

"""Calls whose parameters stand between tags by name: one reader and writer for every family that has its own tags.

A text is written as it is, anything else as JSON, so the tool's schema says which it was (`argument_types.py`). A value
ends at its closing tag; one that holds this or another tag of the grammar cannot be written.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.calls.argument_types import typed, typed_value
from turnwise.chat.calls.reasoning import THINK, UNTHINK, thought_text
from turnwise.chat.calls.scanning import FoundCall, Piece, Scanner, any_of, refuse_unless_read_back
from turnwise.types import JsonSchema, Message, ToolCall

_SLOT = "{}"


@dataclass(frozen=True, slots=True)
class _Written:
    """A parameter as it stands in the text."""

    text: str
    is_text: bool | None = None
    """What its tag says of it, in the grammars where it does."""


class TagGrammar:
    """The tags of one family, `{}` where a name stands; a new line is any white space."""

    def __init__(
        self,
        form: str,
        *,
        block: Sequence[tuple[str, str]],
        call: tuple[str, str],
        parameter: tuple[str, str],
        thoughts: tuple[str, str] = (THINK, UNTHINK),
        trims: bool = False,
        wraps: bool = False,
        stands_alone: bool = False,
    ) -> None:
        """`block`: what opens and closes calls, the first as it is written. `trims`: a new line on either side of a
        value is not part of it, and is written always (`wraps`) or where it is needed. `stands_alone`: a call is
        read without its block, which models forget."""
        self.form, self.thoughts = form, thoughts
        self._block, self._call, self._parameter = dict(block), call, parameter
        self._trims, self._wraps = trims, wraps
        self._says_text = parameter[0].count(_SLOT) == 2
        self._opens = re.compile(_pattern(call[0], name=r'[^\s<>"]+'))
        self._closes = re.compile(_pattern(call[1]))
        self._begins = re.compile(_pattern(parameter[0], name=r'[^<>"\n]+'))
        own = "|".join(sorted({head for tag in (*call, parameter[0]) for head in _heads(tag)}))
        self._value_end = re.compile(any_of({parameter[1], *self._block, *self._block.values()}) + f"|{own}")
        """The first is a value's end. At any other tag of the grammar it was not closed: the rest is not its text."""
        think, unthink = thoughts
        marks = any_of({*self._block, think, unthink})
        self._ends = {opened: re.compile(rf"\s*{re.escape(closed)}") for opened, closed in block}
        self._ends[""] = re.compile(rf"(?:\s*(?:{any_of(self._block.values())}))?")
        """What closes a block by what opened it; a call that stands alone may still be followed by a closing tag."""
        self._recovers = re.compile(rf"{any_of(self._block.values())}|(?={marks})|\Z")
        self._alone = call[0].partition(_SLOT)[0] if stands_alone else ""
        opening = any_of(self._block) + (f"|(?={re.escape(self._alone)})" if stands_alone else "")
        self._scanner = Scanner(opening, self._read, {think: unthink})

    def parse(self, text: str, *, turn: int, in_reasoning: bool, tools: Sequence[JsonSchema] = ()) -> Message:
        """The assistant message in a completion's text."""
        return self._scanner.message(text, turn=turn, in_reasoning=in_reasoning, tools=tools)

    def render_call(self, call: ToolCall) -> str:
        """The text a model writes to make this call."""
        opened, closed = next(iter(self._block.items()))
        parameters = [self._write(key, value) for key, value in call.arguments.items()]
        inside = "\n".join([self._call[0].replace(_SLOT, call.name), *parameters, *filter(None, [self._call[1]])])
        text = f"{opened}\n{inside}\n{closed}" if self._call[0] != _SLOT else f"{opened}{inside}\n{closed}"
        mark = re.compile(re.escape(opened)).match(text)
        assert mark is not None
        # With the texts as texts: what stands there must be the same, whatever a schema makes of it.
        texts = {key: value if isinstance(value, str) else _json(value) for key, value in call.arguments.items()}
        read, end = self._calls(text, mark.end(), opened, None)
        calls = read if end == len(text) else []
        refuse_unless_read_back(text, ToolCall(call.id, call.name, texts), calls, self.form)
        return text

    def render_malformed_call(self, call: ToolCall) -> str:
        """The text of a call whose closing tag is missing."""
        return self.render_call(call).removesuffix(next(iter(self._block.values())))

    def render_thought(self, thought: str, *, is_open: bool) -> str:
        """The text of a thought; `is_open` when the prompt opened it."""
        return thought_text(thought, *self.thoughts, is_open=is_open)

    def _write(self, key: str, value: Any) -> str:
        is_text = isinstance(value, str)
        text = value if is_text else _json(value)
        if self._trims and (self._wraps or text[:1] == "\n" or text[-1:] == "\n"):
            text = f"\n{text}\n"
        opened = self._parameter[0].replace(_SLOT, key, 1).replace(_SLOT, "true" if is_text else "false")
        return f"{opened}{text}{self._parameter[1]}"

    def _read(self, text: str, mark: re.Match[str], tools: Sequence[JsonSchema]) -> tuple[list[Piece], int]:
        if not mark.group() and not self._opens.match(text, mark.start()):
            return [self._alone], mark.start() + len(self._alone)  # only words that look like the beginning of a call
        calls, end = self._calls(text, mark.end(), mark.group(), tools)
        return [*calls], end

    def _calls(
        self, text: str, position: int, opened: str, tools: Sequence[JsonSchema] | None
    ) -> tuple[list[FoundCall], int]:
        """The calls of a block, and where it ends; without tools the values as they stand."""
        calls, problem = list[FoundCall](), None
        while problem is None and (self._call[1] or not calls) and (call := self._opens.match(text, position)):
            name, written, position, problem = self._arguments(text, call)
            calls.append(FoundCall(name, self._typed(name, written, tools), problem))
        if problem is None:
            end = self._ends[opened].match(text, position)
            if end and calls:
                return calls, end.end()
            what = f"the call has no {self._block[opened]}" if calls else f"after {opened} comes {self._call[0]}"
            calls[-1:] = [FoundCall(calls[-1].name if calls else "", {}, what.replace(_SLOT, "NAME"))]
        recovered = self._recovers.search(text, position)
        assert recovered is not None  # \Z matches at the latest
        return calls, recovered.end()

    def _arguments(self, text: str, call: re.Match[str]) -> tuple[str, dict[str, _Written], int, str | None]:
        """(name, parameters, where they end, what is wrong)."""
        name, position, written = call[1], call.end(), dict[str, _Written]()
        while begin := self._begins.match(text, position):
            key, position = begin[1], begin.end()
            end = self._value_end.search(text, position)
            if end is None or end.group() != self._parameter[1]:
                position = position if end is None else end.start()
                return name, {}, position, f"parameter {key!r} has no {self._parameter[1]}"
            value, position = text[position : end.start()], end.end()
            if key in written:
                return name, {}, position, f"parameter {key!r} is given twice"
            if self._trims:
                value = value.removeprefix("\n").removesuffix("\n")
            written[key] = _Written(value, begin[2] == "true" if self._says_text and begin[2] else None)
        close = self._closes.match(text, position)
        if close is None:
            return name, {}, position, f"the call has no {self._call[1]}, or a parameter is not written as one"
        return name, written, close.end(), None

    def _typed(self, name: str, written: dict[str, _Written], tools: Sequence[JsonSchema] | None) -> dict[str, Any]:
        if tools is None:
            return {key: parameter.text for key, parameter in written.items()}
        by_schema = {key: parameter.text for key, parameter in written.items() if parameter.is_text is None}
        values = typed(name, by_schema, tools)
        types = {True: frozenset({"string"}), False: frozenset[str]()}
        return {
            key: values[key] if parameter.is_text is None else typed_value(parameter.text, types[parameter.is_text])
            for key, parameter in written.items()
        }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _heads(tag: str) -> list[str]:
    """Patterns of the beginnings of a tag's own tags, whatever their names and attributes are."""
    return [rf"{re.escape(head)}(?=[\s=>])" for head in re.findall(r"</?[^\s=>{}]+", tag)]


def _pattern(tag: str, name: str = "") -> str:
    """A tag with white space around it; the first {} is a name, the second says true or false and may be missing."""
    parts = [r"\s*".join(map(re.escape, part.split("\n"))) for part in tag.split(_SLOT)]
    if len(parts) == 3:
        attribute = re.escape('" string="')
        assert parts[1] == attribute
        return rf'\s*{parts[0]}({name})"(?:\s+string="(true|false)")?\s*>'
    return rf"\s*{f'({name})'.join(parts)}"

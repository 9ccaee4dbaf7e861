"""Tool calls in JSON: strict, and found between marks in linear time."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from turnwise.chat.calls.scanning import FoundCall, any_of

DEEPEST = 200
"""Levels of nesting a call may have; what reads it later should never meet Python's own limit."""


@dataclass(frozen=True, slots=True)
class Body:
    """JSON that stands before a mark: its value, or the problem with it."""

    value: Any
    problem: str | None
    stop: int
    """Where the mark begins."""
    mark: str
    """The mark; empty at the end of the text."""
    end: int


class JsonBefore:
    """Finds JSON that ends at one of these marks. Marks inside the strings of valid JSON are only text.

    Where a call needs no quotes (`{}` will do), one could stand inside a string of a call whose braces are wrong:
    `keeps_strings` has it stay there.
    """

    def __init__(self, marks: Iterable[str], *, keeps_strings: bool = True) -> None:
        self._keeps_strings = keeps_strings
        pattern = any_of(marks)
        self._walk = re.compile(rf'"[^"\\]*(?:\\.[^"\\]*)*"|["\\]|(?P<mark>{pattern})', re.DOTALL)
        self._plain = re.compile(rf"{pattern}|\Z")

    def read(self, text: str, start: int) -> Body:
        """The JSON value that begins at `start`, up to the next mark of the format."""
        bounds = self.span(text, start)
        if bounds is not None:
            body = _body(text, start, *bounds)
            if body.problem is None or self._keeps_strings:
                return body
        # The mark may stand inside a string that is not closed.
        plain = self._plain.search(text, start)
        assert plain is not None  # \Z matches at the latest
        return _body(text, start, *plain.span())

    def span(self, text: str, start: int) -> tuple[int, int] | None:
        """Where the first mark outside of strings stands, or the text's end; None when a string is not closed."""
        for match in self._walk.finditer(text, start):
            if match["mark"] is not None:
                return match.span()
            if len(match.group()) == 1:
                return None
        return len(text), len(text)


def _body(text: str, start: int, stop: int, end: int) -> Body:
    value, problem = None, None
    try:
        value = load(text[start:stop])
    except (ValueError, RecursionError) as error:
        problem = str(error)
    return Body(value, problem, stop, text[stop:end], end)


def load(text: str) -> Any:
    """Strict JSON: no NaN, and nothing that could be neither stored nor sent to a tool."""
    return _sound(_JSON.decode(text), text)


def decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins here, and where it ends."""
    value, end = _JSON.raw_decode(text, start)
    return _sound(value, text[start:end]), end


def _sound(value: Any, text: str) -> Any:
    level, depth = [value], 0
    if text.count("{") + text.count("[") < DEEPEST:  # the usual case needs no walk
        level = []
    while level := [item for container in level if isinstance(container, (dict, list)) for item in _items(container)]:
        depth += 1
        if depth >= DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate raises a UnicodeEncodeError, a ValueError
    return value


def call_of(value: Any, key: str = "arguments") -> FoundCall:
    """The call in an object like {"name": ..., "arguments": {...}}."""
    if not isinstance(value, dict):
        return FoundCall("", {}, f'the call must be an object like {{"name": ..., "{key}": {{...}}}}')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return FoundCall("", {}, 'the call has no "name"')
    return call_with(name, value.get(key), key)


def call_with(name: str, arguments: Any, key: str = "arguments") -> FoundCall:
    """The call of a tool with these arguments."""
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        try:
            arguments = load(arguments)
        except (ValueError, RecursionError) as error:
            return FoundCall(name, {}, f'"{key}" is not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return FoundCall(name, {}, f'"{key}" must be an object')
    return FoundCall(name, arguments)


def _items(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


_JSON = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)

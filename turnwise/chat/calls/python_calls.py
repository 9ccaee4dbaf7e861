"""Calls written as Python, [f(x=1), g(y="a")]: read by a grammar of literals, so that nothing is ever run.

Texts are between quotes, with Python's escapes; numbers, lists and objects as in Python or JSON. A call that is not all
of this makes the whole list unreadable. Every character is looked at once.
"""

import json
import re
from typing import Any

from turnwise.chat.calls.json_calls import DEEPEST
from turnwise.chat.calls.scanning import FoundCall
from turnwise.errors import TemplateError
from turnwise.types import ToolCall

OPENING = r"\[\s*[A-Za-z_][\w.\-]*\("
"""How a list of calls begins."""
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"([A-Za-z_][\w.\-]*)\(")
_KEY = re.compile(r"([A-Za-z_][\w\-]*)\s*=(?!=)\s*")
_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|\'[^\'\\]*(?:\\.[^\'\\]*)*\'', re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z_]\w*")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
"""Python's and JSON's: some templates write the second."""
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_LETTERS = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "",
    "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip
_MOST_DIGITS = 4000
"""Python itself turns no longer text into a number."""


class _Unreadable(Exception):
    """What is wrong with a list of calls."""

    def __init__(self, problem: str, at: int, name: str = "") -> None:
        super().__init__(problem)
        self.at = at
        """How far it was read."""
        self.name = name
        """Of the call that it was in."""


def calls_or_problem(text: str, start: int, mark: str, ending: re.Pattern[str]) -> tuple[list[FoundCall], int]:
    """The calls of the list that begins after a mark, or the one problem with it, and where they end: a list that
    cannot be read goes on to the next `ending`."""
    begin = _skip(text, start)
    try:
        if not text.startswith("[", begin):
            raise _Unreadable(f"after {mark} comes [NAME(KEY=VALUE, ...)]", begin)
        return _calls(text, begin)
    except _Unreadable as error:
        end = ending.search(text, error.at)
        return [FoundCall(error.name, {}, str(error))], end.start() if end else len(text)


def _calls(text: str, position: int) -> tuple[list[FoundCall], int]:
    """The calls of the list that begins here, and where it ends; _Unreadable when it is not one."""
    calls, position = list[FoundCall](), _skip(text, position + 1)
    while True:
        named = _NAME.match(text, position)
        if named is None:
            raise _Unreadable("a list of calls holds NAME(KEY=VALUE, ...) and nothing else", position)
        try:
            arguments, position = _arguments(text, named.end())
        except _Unreadable as error:
            raise _Unreadable(str(error), error.at, named[1]) from None
        calls.append(FoundCall(named[1], arguments))
        position = _skip(text, position)
        if text.startswith("]", position):
            return calls, position + 1
        if not text.startswith(",", position):
            raise _Unreadable("the list of calls is not closed: ] is missing", position, named[1])
        position = _skip(text, position + 1)


def written_call(call: ToolCall) -> str:
    """The text of a list that holds this call alone."""
    return f"[{call.name}({', '.join(f'{key}={_written(value)}' for key, value in call.arguments.items())})]"


def _arguments(text: str, position: int) -> tuple[dict[str, Any], int]:
    arguments, position = dict[str, Any](), _skip(text, position)
    while not text.startswith(")", position):
        key = _KEY.match(text, position)
        if key is None:
            raise _Unreadable("arguments are given as KEY=VALUE", position)
        if key[1] in arguments:
            raise _Unreadable(f"argument {key[1]!r} is given twice", position)
        arguments[key[1]], position = _value(text, key.end(), 0)
        position = _after(text, position, ")")
    return arguments, position + 1


def _value(text: str, position: int, depth: int) -> tuple[Any, int]:
    """The value that begins here, and where it ends."""
    if depth >= DEEPEST:
        raise _Unreadable(f"nested more than {DEEPEST} deep", position)
    first = text[position : position + 1]
    if first in ("'", '"') and first:
        quoted = _TEXT.match(text, position)
        if quoted is None:
            raise _Unreadable(f"a text has no end: close it with {first}", len(text))
        return _unescaped(quoted.group()[1:-1], position), quoted.end()
    if first in ("[", "{") and first:
        return _items(text, position, depth)
    if number := _NUMBER.match(text, position):
        return _number(number.group(), position), number.end()
    word = _WORD.match(text, position)
    if word is None or word.group() not in _WORDS:
        raise _Unreadable("a value is a text in quotes, a number, True, False, None, a list or an object", position)
    return _WORDS[word.group()], word.end()


def _items(text: str, position: int, depth: int) -> tuple[Any, int]:
    """Reads a list or an object: its value, and where the text goes on behind it."""
    closing = "]" if text[position] == "[" else "}"
    values, members = list[Any](), dict[str, Any]()
    position = _skip(text, position + 1)
    while not text.startswith(closing, position):
        value, position = _value(text, position, depth + 1)
        if closing == "}":
            position = _skip(text, position)
            if not isinstance(value, str) or value in members or not text.startswith(":", position):
                raise _Unreadable('an object holds "KEY": VALUE, each key once', position)
            members[value], position = _value(text, _skip(text, position + 1), depth + 1)
        else:
            values.append(value)
        position = _after(text, position, closing)
    return (values if closing == "]" else members), position + 1


def _after(text: str, position: int, closing: str) -> int:
    """Where the next item begins, or where all end."""
    position = _skip(text, position)
    if text.startswith(",", position):
        return _skip(text, position + 1)
    if not text.startswith(closing, position):
        raise _Unreadable(f"the call is not closed: {closing} is missing", position)
    return position


def _number(text: str, position: int) -> int | float:
    if len(text) > _MOST_DIGITS:
        raise _Unreadable("a number has too many digits", position)
    if text.lstrip("+-").isdecimal():
        return int(text)
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _Unreadable(f"{text[:20]} is too large a number", position)
    return value


def _unescaped(text: str, position: int) -> str:
    def meant(match: re.Match[str]) -> str:
        code = match[1]
        if code in _LETTERS:
            return _LETTERS[code]
        if len(code) > 1 and code[0] in "xuU":
            return chr(int(code[1:], 16))
        return chr(int(code, 8)) if code[0] in "01234567" else match.group()  # Python keeps what it does not know

    if "\\" not in text:
        return text
    try:
        plain = _ESCAPE.sub(meant, text)
        plain.encode()
    except (ValueError, OverflowError) as error:  # no such character, or half of one
        raise _Unreadable(f"a text is not valid: {error}", position) from None
    return plain


def _written(value: Any, depth: int = 0) -> str:
    if depth > DEEPEST:
        raise TemplateError(f"a value is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(key)}: {_written(item, depth + 1)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_written(item, depth + 1) for item in value) + "]"
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # its escapes are Python's too


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position

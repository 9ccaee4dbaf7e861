"""Plain Python values: what a column may hold, and why null, absent and {} mean the same."""

import datetime
import decimal
import uuid
from typing import Any

MAX_DEPTH = 64


class FieldError(Exception):
    """A value that cannot be used; whoever knows the row turns it into a DataError."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def plain(value: Any, field: str, depth: int = 0) -> Any:
    """A deep copy in plain Python values; objects lose their null and empty members, an empty object becomes None.

    Arrow gives every row the members of all rows, null-filled, and cannot store an object without members. A file can
    therefore not tell null, absent and {} apart, so they mean the same everywhere, in JSON too.
    """
    if depth > MAX_DEPTH:
        raise FieldError(field, f"nested deeper than {MAX_DEPTH} levels")
    if type(value).__module__ == "numpy":  # told by name, so that numpy need not be imported
        value = value.tolist()
    match value:
        case None | bool() | int() | float() | bytes():
            return value
        case str():
            return _unicode(value, field)
        case dict():
            members = {_key(key, field): plain(member, join(field, key), depth + 1) for key, member in value.items()}
            return {key: member for key, member in members.items() if member is not None} or None
        case list() | tuple():
            return [plain(item, f"{field}[{index}]", depth + 1) for index, item in enumerate(value)]
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal() | uuid.UUID():
            return str(value)
        case _:
            raise FieldError(field, f"values of type {type(value).__name__} cannot be used")


def join(field: str, key: object) -> str:
    """The path of a member: `join("extra_info", "index")` is `extra_info.index`."""
    return f"{field}.{key}" if field else str(key)


def describe(value: Any) -> str:
    """What a value is, in words for an error message; never the value itself, which may be huge."""
    names: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "text", bytes: "bytes"}
    names |= {list: "a list", dict: "an object"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def shorten(text: str, limit: int = 60) -> str:
    """Text short enough for a message of one line."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "..."


def as_object(value: Any, field: str) -> dict[str, Any]:
    """An object; nothing counts as an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FieldError(field, f"expected an object, got {describe(value)}")
    return value


def as_text(value: Any, field: str) -> str:
    """Text that is not blank: a name nobody can have is as bad as a missing one."""
    if not isinstance(value, str):
        raise FieldError(field, "missing" if value is None else f"expected text, got {describe(value)}")
    if not value.strip():
        raise FieldError(field, "empty")
    return value


def _key(key: object, field: str) -> str:
    if not isinstance(key, str):
        raise FieldError(field, f"its keys must be text, one is {describe(key)}")
    return _unicode(key, field)


def _unicode(text: str, field: str) -> str:
    """JSON can spell half a character ("\\ud800"), which no tokenizer and no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FieldError(field, f"not valid Unicode: a lone surrogate at character {error.start}") from error
    return text

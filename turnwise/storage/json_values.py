"""Values whose shape only their writer knows, as JSON texts in a file's columns and back."""

import base64
import json
from typing import Any

from turnwise.errors import StorageError

_BYTES_KEY = "turnwise:bytes"


def clean(value: Any) -> Any:
    """A row whose every text UTF-8 can hold: halves of a surrogate pair are joined, lone ones replaced."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {key: clean(entry) for key, entry in value.items()}
        case list() | tuple():
            return type(value)(clean(entry) for entry in value)
        case _:
            return value


def to_json(value: Any, field: str) -> str:
    """Readable JSON; as ASCII escapes, which keep them, when a text holds lone surrogates."""
    if type(value) is dict and not value:  # nearly always, of what nobody filled in
        return "{}"
    try:
        text = _READABLE.encode(value)
        return text if _is_utf8(text) else json.dumps(value, default=_tag_bytes)
    except RecursionError:
        # A model can nest arguments deeper than we can write; its own words stand in the message.
        return json.dumps({"turnwise:lost": "nested too deeply to store"})
    except (TypeError, ValueError) as error:
        raise StorageError(f"{field} cannot be stored as JSON: {error}") from error


def from_json(text: str) -> Any:
    return json.loads(text, object_hook=_untag_bytes if _BYTES_KEY in text else None)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tag_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES_KEY: base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _untag_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES_KEY]) if set(value) == {_BYTES_KEY} else value


_READABLE = json.JSONEncoder(ensure_ascii=False, default=_tag_bytes)

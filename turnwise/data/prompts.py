"""Prompts: messages with their images, read from the values of one row."""

from collections.abc import Iterator
from typing import Any

from turnwise.data.values import FieldError, as_text, describe, join, shorten
from turnwise.errors import unknown
from turnwise.image_bytes import KINDS, data_url
from turnwise.types import Image, Message, Part, Role, Text

MARKER = "<image>"
_MESSAGE_KEYS = ("role", "content", "name", "tool_call_id")
_SOURCE_KEYS = ("bytes", "path", "image", "url", "image_url")


def read_prompt(value: Any, field: str, images: Any) -> tuple[tuple[Message, ...], tuple[Image, ...]]:
    """The messages, and every image in them in order.

    `images` is the row's `images` column. When it is not None, each `<image>` in a string and each image part
    without a source takes the next of them, and none may be left over.
    """
    supply = None if images is None else _read_images(images)
    waiting = iter(supply or ())
    if isinstance(value, str):
        value = [{"role": Role.USER.value, "content": value}]
    if not isinstance(value, list):
        got = "missing" if value is None else f"expected a list of messages or text, got {describe(value)}"
        raise FieldError(field, got)
    if not value:
        raise FieldError(field, "empty")
    wanted = _count_places(value, supply is not None)
    if wanted != len(supply or ()):
        raise FieldError(
            "images", f"{len(supply or ())} images for {wanted} places ({MARKER} or image parts) in {field}"
        )
    messages = tuple(
        _read_message(entry, f"{field}[{i}]", waiting, supply is not None) for i, entry in enumerate(value)
    )
    parts = [part for message in messages if not isinstance(message.content, str) for part in message.content]
    return messages, tuple(part for part in parts if isinstance(part, Image))


def _count_places(messages: list[Any], marked: bool) -> int:
    """How many images of the column the messages ask for; wrong types are left to the reader of messages."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    markers = sum(content.count(MARKER) for content in contents if isinstance(content, str)) if marked else 0
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return markers + sum(part == {"type": "image"} for part in parts)


def _read_message(entry: Any, field: str, images: Iterator[Image], marked: bool) -> Message:
    if not isinstance(entry, dict):
        raise FieldError(field, f"expected an object with role and content, got {describe(entry)}")
    if "tool_calls" in entry:
        problem = "calls of an earlier turn stand in `content`, written as the model writes them"
        raise FieldError(join(field, "tool_calls"), problem)
    for key in entry:
        if key not in _MESSAGE_KEYS:
            raise FieldError(field, unknown("key", shorten(key), _MESSAGE_KEYS))
    role = as_text(entry.get("role"), join(field, "role"))
    roles = [known.value for known in Role]
    if role not in roles:
        raise FieldError(join(field, "role"), unknown("role", shorten(role), roles))
    names = {key: as_text(entry[key], join(field, key)) for key in ("name", "tool_call_id") if key in entry}
    content = _read_content(entry.get("content"), join(field, "content"), images, marked)
    return Message(Role(role), content, tool_call_id=names.get("tool_call_id"), name=names.get("name"))


def _read_content(value: Any, field: str, images: Iterator[Image], marked: bool) -> str | tuple[Part, ...]:
    match value:
        case str() if marked and MARKER in value:
            pieces: list[Part] = []
            for index, text in enumerate(value.split(MARKER)):
                pieces += [next(images)] if index else []
                pieces += [Text(text)] if text else []
            return tuple(pieces)
        case str():
            return value
        case list():
            return tuple(_read_part(part, f"{field}[{i}]", images) for i, part in enumerate(value))
        case None:
            raise FieldError(field, "missing")
        case _:
            raise FieldError(field, f"expected text or a list of parts, got {describe(value)}")


def _read_part(value: Any, field: str, images: Iterator[Image]) -> Part:
    if not isinstance(value, dict):
        raise FieldError(field, f"expected an object with a type, got {describe(value)}")
    match value.get("type"):
        case "text":
            text = value.get("text")
            if not isinstance(text, str):
                problem = "missing" if text is None else f"expected text, got {describe(text)}"
                raise FieldError(join(field, "text"), problem)
            return Text(text)
        case "image" if value == {"type": "image"}:
            return next(images)
        case "image" | "image_url":
            return read_image(value, field)
        case other:
            name = as_text(other, join(field, "type"))
            raise FieldError(join(field, "type"), unknown("part type", shorten(name), ("text", "image", "image_url")))


def _read_images(value: Any) -> list[Image]:
    if not isinstance(value, list):
        raise FieldError("images", f"expected a list, got {describe(value)}")
    return [read_image(entry, f"images[{i}]") for i, entry in enumerate(value)]


def read_image(value: Any, field: str) -> Image:
    """An image from a path or URL, from bytes, or from an object that holds one of them; bytes go before a path."""
    match value:
        case str():
            return Image(as_text(value, field))
        case bytes():
            return Image(_data_url(value, field))
        case dict():
            for key in _SOURCE_KEYS:
                if key in value:
                    return read_image(value[key], join(field, key))
            raise FieldError(field, f"an image needs one of {', '.join(_SOURCE_KEYS)}")
        case _:
            raise FieldError(field, f"expected a path, bytes or an object with one of them, got {describe(value)}")


def _data_url(data: bytes, field: str) -> str:
    url = data_url(data)
    if url is None:
        raise FieldError(field, f"these bytes are not a {KINDS} image")
    return url

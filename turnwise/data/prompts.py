"""Prompts: messages with their images, read from the values of one row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.data.images.cells import ImageCells, RowImages, is_array_of_bytes
from turnwise.data.values import FieldError, as_text, describe, join, shorten
from turnwise.errors import unknown
from turnwise.types import Image, Message, Part, Role, Text

MARKER = "<image>"
_MESSAGE_KEYS = ("role", "content", "name", "tool_call_id")


def read_prompt(
    value: Any, field: str, images: Any, cells: RowImages | None = None
) -> tuple[tuple[Message, ...], tuple[Image, ...]]:
    """The messages, and every image in them in order.

    `images` is the row's `images` column. When it is not None, each `<image>` in a string and each image part
    without a source takes the next of them, and none may be left over.
    """
    cells = cells or ImageCells().of_row(Path("."), None)  # of no file
    supply = None if images is None else _read_images(images, cells)
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
        _read_message(entry, f"{field}[{i}]", waiting, supply is not None, cells) for i, entry in enumerate(value)
    )
    parts = [part for message in messages if not isinstance(message.content, str) for part in message.content]
    return messages, tuple(part for part in parts if isinstance(part, Image))


def _count_places(messages: list[Any], marked: bool) -> int:
    """How many images of the column the messages ask for; wrong types are left to the reader of messages."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    markers = sum(content.count(MARKER) for content in contents if isinstance(content, str)) if marked else 0
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return markers + sum(part == {"type": "image"} for part in parts)


def _read_message(entry: Any, field: str, images: Iterator[Image], marked: bool, cells: RowImages) -> Message:
    if not isinstance(entry, dict):
        raise FieldError(field, f"expected an object with role and content, got {describe(entry)}")
    if "tool_calls" in entry:
        problem = "put the calls of an earlier turn into `content`, in the format the model writes"
        raise FieldError(join(field, "tool_calls"), problem)
    for key in entry:
        if key not in _MESSAGE_KEYS:
            raise FieldError(field, unknown("key", shorten(key), _MESSAGE_KEYS))
    role = as_text(entry.get("role"), join(field, "role"))
    roles = [member.value for member in Role]
    if role not in roles:
        raise FieldError(join(field, "role"), unknown("role", shorten(role), roles))
    names = {key: as_text(entry[key], join(field, key)) for key in ("name", "tool_call_id") if key in entry}
    content = _read_content(entry.get("content"), join(field, "content"), images, marked, cells)
    return Message(Role(role), content, tool_call_id=names.get("tool_call_id"), name=names.get("name"))


def _read_content(
    value: Any, field: str, images: Iterator[Image], marked: bool, cells: RowImages
) -> str | tuple[Part, ...]:
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
            return tuple(_read_part(part, f"{field}[{i}]", images, cells) for i, part in enumerate(value))
        case None:
            raise FieldError(field, "missing")
        case _:
            raise FieldError(field, f"expected text or a list of parts, got {describe(value)}")


def _read_part(value: Any, field: str, images: Iterator[Image], cells: RowImages) -> Part:
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
            return cells.read(value, field)
        case other:
            name = as_text(other, join(field, "type"))
            raise FieldError(join(field, "type"), unknown("part type", shorten(name), ("text", "image", "image_url")))


def _read_images(value: Any, cells: RowImages) -> list[Image]:
    """A list of images; one that stands alone is a list of one."""
    if isinstance(value, list) and not is_array_of_bytes(value):
        return [cells.read(entry, f"images[{i}]") for i, entry in enumerate(value)]
    return [cells.read(value, "images")]

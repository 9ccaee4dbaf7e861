"""Prompts: messages with their images, read from the values of one row."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.data.images.cells import ImageCells, RowImages, is_array_of_bytes
from turnwise.data.values import FieldError, as_object, as_text, describe, join, shorten
from turnwise.errors.nearest_name import unknown
from turnwise.types import Image, Message, Part, Role, Text, ToolCall

MARKER = "<image>"
_MESSAGE_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")


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
    for key in entry:
        if key not in _MESSAGE_KEYS:
            raise FieldError(field, unknown("key", shorten(key), _MESSAGE_KEYS))
    role = as_text(entry.get("role"), join(field, "role"))
    roles = [member.value for member in Role]
    if role not in roles:
        raise FieldError(join(field, "role"), unknown("role", shorten(role), roles))
    names = {key: as_text(entry[key], join(field, key)) for key in ("name", "tool_call_id") if key in entry}
    calls = read_calls(entry.get("tool_calls"), join(field, "tool_calls"))
    reasoning = entry.get("reasoning_content")
    if not isinstance(reasoning, str | None):
        raise FieldError(join(field, "reasoning_content"), f"expected text, got {describe(reasoning)}")
    for key, value in (("tool_calls", calls), ("reasoning_content", reasoning)):
        if value and role != Role.ASSISTANT:
            raise FieldError(join(field, key), f"a {role} message has none: they are the assistant's")
    words = "" if calls and entry.get("content") is None else entry.get("content")
    content = _read_content(words, join(field, "content"), images, marked, cells)
    return Message(
        Role(role), content, calls, tool_call_id=names.get("tool_call_id"), name=names.get("name"),
        reasoning=reasoning or None,
    )  # fmt: skip


def read_calls(value: Any, field: str) -> tuple[ToolCall, ...]:
    """The calls of an assistant's message, as OpenAI and Hugging Face write them: a function with its name and its
    arguments, an object or the JSON of one."""
    if not isinstance(value, list | None):
        raise FieldError(field, f"expected a list of calls, got {describe(value)}")
    return tuple(_read_call(entry, f"{field}[{number}]", number) for number, entry in enumerate(value or ()))


def _read_call(entry: Any, field: str, number: int) -> ToolCall:
    call = as_object(entry, field)
    if call.get("type", "function") != "function":
        raise FieldError(join(field, "type"), unknown("type", shorten(str(call["type"])), ("function",)))
    function = as_object(call.get("function", call), join(field, "function"))
    name = as_text(function.get("name"), join(field, "function.name"))
    arguments, where = function.get("arguments"), join(field, "function.arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise FieldError(where, f"not valid JSON: {shorten(str(error))}") from error
    call_id = f"call_{number}" if call.get("id") is None else as_text(call["id"], join(field, "id"))
    return ToolCall(call_id, name, as_object(arguments, where))


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

"""Messages as a chat endpoint takes them: text, tool calls, and images as data URLs."""

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.chat.calls.tool_format import ToolFormat
from turnwise.errors import DataError
from turnwise.system.image_bytes import KINDS, media_type
from turnwise.system.image_sources import open_source, read_source
from turnwise.types import Image, Message, Role, Text, ToolCall

MAX_IMAGE_BYTES = 20 * 2**20
"""Servers refuse larger ones, and each turn sends all of them again."""
_HEAD = 64


def as_openai(messages: Sequence[Message], call_format: ToolFormat, urls: Mapping[Image, str]) -> list[dict[str, Any]]:
    """The messages in order; calls that a text spells in this format are not given a second time.

    `urls` are the images as they are sent (`shown_url`). What tools drew follows their results as a user's message:
    results are text there.
    """
    entries: list[dict[str, Any]] = []
    drawn: list[dict[str, Any]] = []
    for message in messages:
        if drawn and message.role is not Role.TOOL:
            entries.append({"role": Role.USER.value, "content": drawn})
            drawn = []
        if message.role is Role.TOOL:
            drawn += [part for part in _parts(message, urls) if part["type"] == "image_url"]
        entries.append(_entry(message, call_format, urls))
    return [*entries, {"role": Role.USER.value, "content": drawn}] if drawn else entries


def assistant_entry(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An assistant's message with calls that its text does not spell."""
    entry: dict[str, Any] = {"role": Role.ASSISTANT.value, "content": text}
    if calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name or "unreadable", "arguments": json.dumps(call.arguments)},
            }
            for call in calls
        ]
    return entry


def check_image(image: Image) -> None:
    """DataError for an image that could not be sent; of a file no more than its beginning is read."""
    if image.source.startswith(("http://", "https://")):
        return
    with open_source(image.source) as file:
        head = file.read(_HEAD)
        size = file.seek(0, io.SEEK_END)
    _check(head, size, _name(image))


def data_url(image: Image) -> str:
    """The image as an address that an endpoint understands: a data URL, or the web address that it is."""
    source = image.source
    if source.startswith(("http://", "https://")):
        return source
    content = read_source(source)
    _check(content, len(content), _name(image))
    if source.startswith(f"data:{media_type(content)};base64,"):  # byte for byte what was sent
        return source
    return _url(content)  # whatever it was said to be


def shown_url(image: Image, max_pixels: int | None) -> str:
    """The image as `data_url` has it, made smaller where it has more pixels; slow, so not on the event loop.

    A web address stays what it is: whoever fetches it decides.
    """
    from turnwise.chat.images.pixels import shown_size, unpack

    url = data_url(image)
    if max_pixels is None or not url.startswith("data:"):
        return url
    content = base64.b64decode(url.partition(",")[2])
    try:
        if math.prod(shown_size(io.BytesIO(content), None)) <= max_pixels:
            return url
        return _url(unpack(content, max_pixels).content)
    except DataError as error:
        raise DataError(f"{image.source[:_HEAD]}: {error}") from error


def _name(image: Image) -> str:
    source = image.source.removeprefix("file://")
    return f"{source[:_HEAD]}..." if source.startswith("data:") else source


def _url(content: bytes) -> str:
    return f"data:{media_type(content)};base64,{base64.b64encode(content).decode('ascii')}"


def _check(content: bytes, size: int, name: str) -> None:
    """DataError for what is no image of this size with this beginning."""
    if size > MAX_IMAGE_BYTES:
        raise DataError(f"the image {name} has {size / 2**20:.1f} MiB; at most {MAX_IMAGE_BYTES // 2**20} MiB are sent")
    if media_type(content) is None:
        raise DataError(f"the image {name} is not a {KINDS} image")


def _entry(message: Message, call_format: ToolFormat, urls: Mapping[Image, str]) -> dict[str, Any]:
    if message.role is Role.ASSISTANT:
        spelled = bool(call_format.parse(message.text, turn=0, in_reasoning=False).tool_calls)
        entry = assistant_entry(message.text, () if spelled else message.tool_calls)
    else:
        entry = {"role": message.role.value, "content": message.text}
    parts = _parts(message, urls)
    if message.role is Role.TOOL:
        entry["tool_call_id"] = message.tool_call_id
    elif parts and message.role is not Role.USER:
        raise DataError(f"a {message.role} message holds an image; endpoints take images of users and tools only")
    elif parts:
        entry["content"] = parts
    return entry


def _parts(message: Message, urls: Mapping[Image, str]) -> list[dict[str, Any]]:
    """The parts of a message with images; none for one that is all text."""
    if isinstance(message.content, str) or not any(isinstance(part, Image) for part in message.content):
        return []
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, Text)
        else {"type": "image_url", "image_url": {"url": urls[part]}}
        for part in message.content
    ]

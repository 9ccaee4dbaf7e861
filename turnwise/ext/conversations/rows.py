"""A row of a conversation: its messages, the tools that are shown, what is not to be learned, and what nobody reads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.data.images.cells import RowImages
from turnwise.data.prompts import read_prompt
from turnwise.data.values import FieldError, as_object, as_text, describe, join, plain, shorten
from turnwise.ext.conversations.layouts import COMMON, RowLayout, layout_of
from turnwise.types import JsonSchema, Message, Role

_ROLES = {"developer": "system", "function": "tool"}
"""Older and newer names of roles."""
_READ = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")
_EMPTY = ("refusal", "audio", "annotations")
"""Keys of a message that OpenAI's client writes without saying anything."""


@dataclass(slots=True)
class ConversationRow:
    """What one row says: `messages[:context]` are only read."""

    messages: list[Message]
    context: int
    tools: list[JsonSchema] | None
    """None where the row names none."""
    unlearned: set[int]
    """Places of the assistant's messages that the row says not to learn."""
    failed: set[int]
    """Places of the tools' replies that are errors."""
    unread: set[str] = field(default_factory=set)
    """Columns and keys that nobody reads."""


def read_row(values: Mapping[str, Any], layout: RowLayout, cells: RowImages) -> ConversationRow:
    """The conversation in a row; FieldError for one that cannot be used."""
    row: dict[str, Any] = plain(dict(values), "") or {}
    for column in layout.columns:
        if column not in row:
            raise FieldError(column, f"missing; the row has {', '.join(map(shorten, row)) or 'nothing'}")
    entries = layout.read(row)
    unread = {name for name in row if name not in (*layout.columns, *layout.optional, *COMMON)}
    plainer = _plainer(entries.messages, unread)
    unlearned = {number for number, message in enumerate(plainer) if not message.pop("weight", True)}
    failed = {number for number, message in enumerate(plainer) if message.pop("failed", False)}
    messages, _ = read_prompt(plainer, "messages", row.get("images"), cells)
    context = _context([message.role for message in messages]) if entries.context is None else entries.context
    answers = {number for number, message in enumerate(messages) if message.role is Role.ASSISTANT}
    if context not in answers:
        raise FieldError("messages", "no message of the assistant's to learn")
    if all(number in unlearned for number in answers if number >= context):
        raise FieldError("messages", "every message of the assistant's has weight 0")
    return ConversationRow(list(messages), context, _tools(row.get("tools")), unlearned, failed, unread)


def with_prompt(values: Mapping[str, Any]) -> dict[str, Any]:
    """The row for a rollout: its `prompt` is what comes before the assistant's first answer, the rest stays as it is.

    FieldError for one that has no such messages.
    """
    layout = layout_of(values, "the row")
    entries = layout.read(values)
    messages = _plainer(entries.messages, set())
    context = _context([message["role"] for message in messages]) if entries.context is None else entries.context
    prompt = [
        {key: value for key, value in message.items() if key not in ("weight", "failed")}
        for message in messages[:context]
    ]
    return {key: value for key, value in values.items() if key not in layout.optional} | {"prompt": prompt}


def _plainer(entries: list[Any], unread: set[str]) -> list[dict[str, Any]]:
    """The messages under the names that prompts have; keys that nobody reads are put among `unread`."""
    return [
        _as_openai(as_object(entry, f"messages[{number}]"), f"messages[{number}]", unread)
        for number, entry in enumerate(entries)
    ]


def _as_openai(entry: dict[str, Any], field: str, unread: set[str]) -> dict[str, Any]:
    """The message under the names that prompts have, with `weight` and `failed` where it says so."""
    message = {key: value for key, value in entry.items() if value is not None and not (key in _EMPTY and not value)}
    role = message.get("role")
    message["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
    for name in ("reasoning", "thinking"):
        thought = message.pop(name, None)
        if thought and not message.get("reasoning_content"):
            message["reasoning_content"] = thought
    if (call := message.pop("function_call", None)) is not None:
        message["tool_calls"] = [call]
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    for name in ("weight", "train"):
        weight = message.pop(name, None)
        if weight is not None:
            if weight not in (0, 1):
                raise FieldError(join(field, name), f"expected 0 or 1, got {shorten(str(weight))}")
            message["weight"] = bool(weight)
    if message.pop("is_error", False) or message.pop("status", None) == "error":
        message["failed"] = True
    for key in [key for key in message if key not in (*_READ, "weight", "failed")]:
        unread.add(f"messages[].{key}")
        del message[key]
    return message


def _context(roles: Sequence[Any]) -> int:
    """How many come before the assistant's first answer: what he said before anybody asked is only read."""
    first = roles.index(Role.USER) if Role.USER in roles else 0
    return roles.index(Role.ASSISTANT, first) if Role.ASSISTANT in roles[first:] else len(roles)


def _tools(value: Any) -> list[JsonSchema] | None:
    """The schemas of a `tools` column: a list, or the JSON of one; functions with their wrapper or without."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise FieldError("tools", f"not valid JSON: {shorten(str(error))}") from error
    if value is None:
        return None
    if not isinstance(value, list):
        raise FieldError("tools", f"expected a list of schemas, got {describe(value)}")
    return [_schema(entry, f"tools[{number}]") for number, entry in enumerate(value)]


def _schema(entry: Any, field: str) -> JsonSchema:
    if isinstance(entry, str):
        try:
            entry = json.loads(entry)
        except (ValueError, RecursionError) as error:
            raise FieldError(field, f"not valid JSON: {shorten(str(error))}") from error
    schema = as_object(entry, field)
    function = as_object(schema.get("function", schema), join(field, "function"))
    as_text(function.get("name"), join(field, "function.name"))
    return schema if "function" in schema else {"type": "function", "function": function}

"""The forms in which a message can be put to a chat template; which one it takes is found by trying."""

import enum
from dataclasses import replace
from typing import Any

from turnwise.chat.calls.tool_format import ToolFormat
from turnwise.errors import TemplateError
from turnwise.types import Message, Text


class CallsHidden(TemplateError):
    """The template does not show every call of a message."""


class ContentForm(enum.StrEnum):
    """How what a message says is put to the template; a message with images comes in parts always."""

    STRING = "string"
    PARTS = "parts"
    """As a list of parts, for templates that show nothing else."""


class CallForm(enum.StrEnum):
    """How an assistant message with tool calls is put to the template."""

    RAW = "raw"
    """As the text the policy wrote."""
    STRUCTURED = "structured"
    """As `tool_calls`, for templates that refuse a tool message after plain text."""


class ThoughtForm(enum.StrEnum):
    """How an assistant message with reasoning is put to the template."""

    WRITTEN = "written"
    """As the text the policy wrote."""
    OPENED = "opened"
    """With the <think> that the header had opened, for templates that look for both tags."""
    APART = "apart"
    """As `reasoning_content`, for templates that look for no tags."""


def apart(reasoning: str) -> dict[str, Any]:
    """Reasoning by the names under which templates look for it."""
    return {"reasoning_content": reasoning, "thinking": reasoning}


def spelled(message: Message, call_format: ToolFormat) -> Message:
    """The message with its calls in its text, for a template that shows no calls."""
    calls = "\n".join(call_format.render_call(call) for call in message.tool_calls)
    if message.images:
        return replace(message, content=(*message.content, Text(f"\n{calls}")), tool_calls=())
    return replace(message, content=f"{message.text}\n{calls}" if message.text else calls, tool_calls=())


def squash(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())

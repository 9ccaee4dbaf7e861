"""The forms in which a message can be put to a chat template; which one it takes is found by trying."""

import enum


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

"""The hermes tool-call format: JSON inside <tool_call> tags, reasoning inside <think> tags."""

import json
import re
from typing import Any, NoReturn

from turnwise.types import Message, Role, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, UNTHINK = "<think>", "</think>"
_TAG = re.compile(r"<think>|</think>|<tool_call>")
_STRING_OR_TAG = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\\]|</?(?:tool_call|think)>', re.DOTALL)
_BLOCK_END = re.compile(r"</tool_call>|(?=<tool_call>|</?think>)|\Z")


def parse(text: str, *, turn: int, in_reasoning: bool) -> Message:
    """The assistant message in a completion's text.

    Reasoning is set apart while calls are looked for, so a call the model only considers is never run, and a tag
    inside a call's JSON strings is only text. `in_reasoning` says that the prompt already opened the <think> block.
    """
    thoughts: list[str] = []
    said: list[str] = []
    calls: list[ToolCall] = []
    position = section = 0  # `section`: where the words since the last thought begin
    thinking = in_reasoning and not text.lstrip().startswith(THINK)
    while position < len(text) or thinking:
        if thinking:
            end = text.find(UNTHINK, position)
            thoughts.append(text[position : end if end >= 0 else None].strip())
            position = section = end + len(UNTHINK) if end >= 0 else len(text)
            thinking = False
            spoken, called = len(said), len(calls)
            continue
        ...
    return Message(Role.ASSISTANT, text, tuple(calls), reasoning=None, answer="")

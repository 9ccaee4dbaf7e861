"""Tools and messages that come again are the same objects: the renderer knows by identity what it has rendered before.

Each call brings its own copies, and finding out what the template does to them anew costs sixty renders.
"""

import functools
import json
from collections.abc import Sequence

from turnwise.types import JsonSchema, Message, Role

LONGEST = 1 << 14
"""Characters of what is kept."""


def tools(schemas: Sequence[JsonSchema]) -> Sequence[JsonSchema]:
    """The tools that an earlier call brought, if they were the same to the letter."""
    text = json.dumps(schemas)
    return _tools(text) if len(text) <= LONGEST else schemas


def message(original: Message) -> Message:
    """The message that an earlier call brought, if it was the same: siblings begin alike."""
    if not isinstance(original.content, str) or original.tool_calls or len(original.content) > LONGEST:
        return original
    return _message(original.role, original.content, original.tool_call_id, original.name)


@functools.lru_cache(maxsize=256)
def _tools(text: str) -> tuple[JsonSchema, ...]:
    return tuple(json.loads(text))


@functools.lru_cache(maxsize=1024)
def _message(role: Role, text: str, tool_call_id: str | None, name: str | None) -> Message:
    return Message(role, text, tool_call_id=tool_call_id, name=name)

"""Which recorded sequence a client's messages go on: compared by what they mean, not by how an SDK spells them.

SDKs send the assistant's message back with other white space in its arguments, null for an empty text and without its
reasoning; LangChain does all three. A sequence is known by a digest of its tools and messages, so that a call costs
what it brings and not what was recorded.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from turnwise.types import Image, JsonSchema, Message, Part, Role, Text, ToolCall


def start(tools: Sequence[JsonSchema]) -> bytes:
    """The digest of a sequence without messages: other tools make another prompt."""
    return _digest(b"", list(tools))


def after(digest: bytes, message: Message) -> bytes:
    """The digest with one more message."""
    return _digest(digest, _meaning(message))


def assistant_after(digest: bytes, text: str, calls: Sequence[ToolCall]) -> bytes:
    """The digest with the assistant's message as a client was shown it."""
    return after(digest, Message(Role.ASSISTANT, text, tuple(calls)))


def digests(tools: Sequence[JsonSchema], messages: Sequence[Message]) -> Iterator[bytes]:
    """Those of no message, of the first one, of the first two, and so on to all of them."""
    digest = start(tools)
    yield digest
    for message in messages:
        digest = after(digest, message)
        yield digest


def _meaning(message: Message) -> list[Any]:
    if message.role is Role.ASSISTANT:
        return ["assistant", message.text.strip(), [[call.name, call.arguments] for call in message.tool_calls]]
    content = message.content
    parts = [["text", content]] if isinstance(content, str) else [_part(part) for part in content]
    return [message.role.value, parts, message.tool_call_id, message.name]


def _part(part: MemoryHolder) -> list[str]:
    match part:
        case Text(text):
            return ["text", text]
        case Image(source):
            return ["image", source]


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()

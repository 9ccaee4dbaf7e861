"""Messages of megabytes: told by their characters that no context holds them, or rendered and encoded in a thread."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from turnwise.types import Message, Role

if TYPE_CHECKING:
    from turnwise.chat.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 50_000
"""Characters of messages that are put to the model in a thread."""


def is_large(messages: Sequence[Message]) -> bool:
    """Whether others would have to wait for these."""
    return sum(len(message.text) for message in messages) > LARGE


async def off_loop(messages: Sequence[Message], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the work gives, in a thread when its messages are large."""
    if is_large(messages):
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


def exceed(messages: Sequence[Message], tokenizer: "Tokenizer", context_length: int) -> bool:
    """Whether messages are too long for a context by their characters alone. The assistant's are not counted, since a
    template may leave out thoughts."""
    characters = sum(len(message.text.strip()) for message in messages if message.role is not Role.ASSISTANT)
    if characters <= max(LARGE, context_length):
        return False
    most = tokenizer.most_characters
    return most is not None and characters > most * context_length

"""What tools and users wrote, inside a rendered text: kept from forging control tokens, and found again."""

import string
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from turnwise.chat.tokenizer import occurrences
from turnwise.errors import EpisodeError
from turnwise.types import JsonSchema, Message, Part, Role, Text


class ControlTokens:
    """The texts of control tokens, and which of them a text spells: it may be one of thousands."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted(texts))
        self._longest_first = sorted(self.texts, key=len, reverse=True)  # one may begin with another
        self._starts = tuple({text[:2] for text in self.texts})

    def spelled_in(self, texts: Sequence[str]) -> list[str]:
        """Those that stand in one of the texts, the longer first."""
        if not self._may_spell(texts):
            return []
        return [spelled for spelled in self._longest_first if any(spelled in text for text in texts)]

    def _may_spell(self, texts: Sequence[str]) -> bool:
        for text in texts:  # no generators: asked of every reply
            for start in self._starts:
                if start in text:
                    return True
        return False


class ControlTokenEscaper:
    """Stand-ins for the control tokens that a text merely spells, so that the template's own can be told apart.

    `<|im_end|>` becomes `Zaaaaaaaaa`: plain letters, which no template trims or escapes, and as many of them, so that
    every position stays what it was.
    """

    def __init__(self, control: ControlTokens, texts: Sequence[str]) -> None:
        self._control = control.texts
        self._stand_ins: dict[str, str] = {}
        for spelled in control.spelled_in(texts):
            self._stand_ins[spelled] = stand_in_for(len(spelled), [*texts, *self._stand_ins.values()])

    @property
    def hides(self) -> bool:
        """Whether it has anything to hide."""
        return bool(self._stand_ins)

    def escape(self, message: Message) -> Message:
        """A message of a tool or user in escaper; the system and the assistant may write control tokens."""
        if not self._stand_ins or message.role not in (Role.TOOL, Role.USER):
            return message
        return replace(
            message, content=with_texts(message, self._escape), name=message.name and self._escape(message.name)
        )

    def escape_tools(self, tools: Sequence[JsonSchema]) -> Sequence[JsonSchema]:
        """Schemas as they are shown: they may be a server's words."""
        return [self._escape_all(schema) for schema in tools] if self._stand_ins else tools

    def unescape(self, text: str) -> tuple[str, list[int]]:
        """The text as it was written, and the cuts through every control token it merely spells."""
        if not self._stand_ins:
            return text, []
        hidden = occurrences(tuple(self._stand_ins.values()), text)
        for spelled, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, spelled)
        cuts = set()
        for start, end in occurrences(self._control, text):
            before_end = bisect_left(hidden, (end,))
            if before_end and hidden[before_end - 1][1] > start:
                cuts.add(start + 1)
        return text, sorted(cuts)

    def _escape_all(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._escape_all(key): self._escape_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape_all(item) for item in value]
        return self._escape(value) if isinstance(value, str) else value

    def _escape(self, text: str) -> str:
        for spelled, stand_in in self._stand_ins.items():
            text = text.replace(spelled, stand_in)
        return text


def with_texts(message: Message, change: Callable[[str], str]) -> str | tuple[Part, ...]:
    """A message's content with every text changed; images stay where they are among them."""
    if isinstance(message.content, str) or not message.images:
        return change(message.text)
    return tuple(Text(change(part.text)) if isinstance(part, Text) else part for part in message.content)


def stand_in_for(length: int, texts: Sequence[str]) -> str:
    """A word that stands nowhere in the texts. Its first letter does not come again, so two of them never overlap."""
    lower = string.ascii_lowercase
    plain = ("Z" + (first + second + "a" * length)[: length - 1] for first in lower for second in lower)
    private = (chr(code) + "\uf8ff" * (length - 1) for code in range(0xE000, 0xF8FF))
    for word in chain(plain, private):
        if not any(word in text for text in texts):
            return word
    raise EpisodeError("a reply spells control tokens and holds every character that could stand in for them")


def texts_in(value: Any) -> Iterator[str]:
    """Every text of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def fresh_mark(texts: Iterable[str]) -> str:
    """A word that stands nowhere in the texts. Letters and digits only: no template trims, escapes or splits it."""
    texts, number = list(texts), 0
    while any(f"turnwiseXmark{number}X" in text for text in texts):
        number += 1
    return f"turnwiseXmark{number}X"


def place(tail: str, skeleton: str, marks: Sequence[str], texts: Sequence[str]) -> list[tuple[int, int]] | None:
    """Where each reply stands in the tail, found by the same tail with marks in place of the replies.

    None when what stands around a mark differs from what stands around the reply, so that it cannot be told.
    """
    glue, cursor = [], 0
    for mark in marks:
        start = skeleton.index(mark, cursor)
        glue.append(skeleton[cursor:start])
        cursor = start + len(mark)
    glue.append(skeleton[cursor:])
    places: list[tuple[int, int]] = []
    end = 0
    for number, text in enumerate(texts):
        start, following = end + len(glue[number]), glue[number + 1]
        if not tail.startswith(glue[number], end):
            return None
        if number == len(texts) - 1:
            end = len(tail) - len(following)
        else:  # as it was written, trimmed, or otherwise rewritten by the template
            guess = next((g for g in (text, text.strip()) if tail.startswith(g + following, start)), None)
            end = tail.find(following, start) if guess is None else start + len(guess)
        if end < start:
            return None
        places.append((start, end))
    return places if tail.endswith(glue[-1]) else None


def shared(first: Sequence[object], other: Sequence[object]) -> int:
    """How many items two sequences share at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))

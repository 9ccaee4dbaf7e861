"""How much of a tool's reply the model is shown: tokens of its head, its tail or both, and a note of the rest."""

import asyncio
import unicodedata
from collections.abc import Callable, Sequence

from turnwise.config.choices import Keep

TokenSpans = Callable[[str], Sequence[tuple[int, int]]]
"""Where each token of a text begins and ends in it, in characters."""

CHARACTERS_PER_TOKEN = 4
"""What a token is taken for where nobody can count: an endpoint keeps its tokenizer to itself."""
MOST_PER_TOKEN = 32
"""Characters looked at for each token wanted: a reply of many megabytes is not encoded to keep a page of it."""
_LONG = 16_384
"""Characters from which on counting leaves the event loop."""
_JOINED = 16
"""Characters that a cut moves back at most for what belongs together."""


async def fit(text: str, limit: int, keep: Keep, spans: TokenSpans | None) -> tuple[str, bool]:
    """(the text cut to `limit` tokens with a note of how many characters are missing, whether it was cut)."""
    if len(text) * 4 <= limit:  # bytes of a character; a token has at least one
        return text, False
    if spans is None:
        most = limit * CHARACTERS_PER_TOKEN
        if len(text) <= most:
            return text, False
        head, tail = _shares(most, keep)
        return _cut(text, head, len(text) - tail), True
    if len(text) > _LONG:
        return await asyncio.to_thread(_fit_tokens, text, limit, keep, spans)
    return _fit_tokens(text, limit, keep, spans)


def _fit_tokens(text: str, limit: int, keep: Keep, spans: TokenSpans) -> tuple[str, bool]:
    window = limit * MOST_PER_TOKEN
    head, tail = _shares(limit, keep)
    if len(text) <= window:
        first = last = spans(text)
        if len(first) <= limit:
            return text, False
    else:
        first, last = (spans(text[:window]) if head else ()), (spans(text[-window:]) if tail else ())
    # Cut at the tokens left out: one that holds a piece of a character takes all of the character with it.
    start = _at(first, head, 0, window) if head else 0
    shift = max(len(text) - window, 0)
    end = _at(last, len(last) - tail - 1, 1, 0) + shift if tail else len(text)
    return _cut(text, min(start, end), end), True


def _at(spans: Sequence[tuple[int, int]], token: int, side: int, without: int) -> int:
    """Where a token begins or ends; `without` where there are too few."""
    return spans[token][side] if 0 <= token < len(spans) else without


def _shares(limit: int, keep: Keep) -> tuple[int, int]:
    """How much of the head and of the tail is kept."""
    match keep:
        case Keep.head:
            return limit, 0
        case Keep.tail:
            return 0, limit
        case Keep.both:
            return limit - limit // 2, limit // 2


def _cut(text: str, start: int, end: int) -> str:
    """The text without what lies between, and a note in its place."""
    start = _border(text, start, -1)
    end = max(start, _border(text, end, 1))
    return f"{text[:start]}\n[... {end - start} characters left out ...]\n{text[end:]}"


def _border(text: str, at: int, step: int) -> int:
    """The nearest place where what belongs to one sign (an accent, a joined emoji) is not torn."""
    for index in range(at, at + step * _JOINED, step):
        if not 0 < index < len(text) or not _joined(text[index - 1], text[index]):
            return index
    return at


def _joined(left: str, right: str) -> bool:
    if right < "\u0300" and left != "\u200d":  # most text: ASCII and Latin
        return left == "\r" and right == "\n"
    modifier = "\U0001f3fb" <= right <= "\U0001f3ff" or "\ufe00" <= right <= "\ufe0f"
    return modifier or "\u200d" in (left, right) or unicodedata.combining(right) != 0

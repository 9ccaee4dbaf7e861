"""The tokens that follow a completion, by who wrote them: what a tool or a user said keeps its origin."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from turnwise.chat.control_tokens import place, shared
from turnwise.chat.tokenizer import Encoding
from turnwise.types import Message, Origin, Role

REPLY_ORIGIN = {Role.TOOL: Origin.TOOL, Role.USER: Origin.USER, Role.SYSTEM: Origin.USER}


class Span(NamedTuple):
    """Consecutive token ids that have one origin: the template, the policy, a tool or a user."""

    ids: list[int]
    origin: Origin


_START, _END = itemgetter(0), itemgetter(1)

Characters = tuple[int, int, Origin]
"""(start, end, who wrote it) of characters."""


def replies_in(tail: str, skeleton: str, replies: dict[str, Message]) -> Iterator[Characters]:
    """Where what tools and users wrote stands in the tail; `skeleton` has marks in place of their words."""
    messages = list(replies.values())
    places = place(tail, skeleton, list(replies), [message.text for message in messages])
    if places is None:  # the template writes something else around these replies: all that differs counts as theirs
        start = shared(tail, skeleton)
        end = len(tail) - shared(tail[start:][::-1], skeleton[start:][::-1])
        places, messages = [(start, end)], messages[:1]
    for (start, end), message in zip(places, messages, strict=True):
        if start < end:
            yield start, end, REPLY_ORIGIN[message.role]


def add_spans(
    spans: list[Span],
    encoding: Encoding,
    places: Sequence[Characters],
    control_ids: frozenset[int],
    *,
    skip: int = 0,
) -> None:
    """Tokens that touch a place are its writer's; control tokens and the rest are the template's.

    The first `skip` tokens are there already.
    """
    ids, offsets, done = encoding.ids, encoding.offsets, skip
    for start, end, origin in places:
        first = bisect_right(offsets, start, lo=done, key=_END)
        last = bisect_left(offsets, end, lo=first, key=_START)
        add_span(spans, ids[done:first], Origin.TEMPLATE)
        written, done = ids[first:last], last
        if control_ids.isdisjoint(written):
            add_span(spans, written, origin)
        else:
            for token in written:
                add_span(spans, [token], Origin.TEMPLATE if token in control_ids else origin)
    add_span(spans, ids[done:], Origin.TEMPLATE)


def add_span(spans: list[Span], ids: Sequence[int], origin: Origin) -> None:
    """Tokens of one origin after those that are there."""
    if not ids:
        return
    if spans and spans[-1].origin is origin:
        spans[-1].ids.extend(ids)
    else:
        spans.append(Span(list(ids), origin))

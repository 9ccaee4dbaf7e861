"""One frame: the text and tokens that a chat template puts around replies, ready to be filled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from turnwise.chat.spans import REPLY_ORIGIN, Characters, Span, add_span, add_spans
from turnwise.chat.tokenizer import Tokenizer
from turnwise.types import Message, Origin, Role


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the words of a reply go."""

    number: int
    role: Role
    trims: bool
    """Whether the template takes white space from the edges."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens that are always the same (`ids`), or pieces of text and slots that are encoded together.

    Of those the first `skip` tokens are there already: the control token that the text follows.
    """

    ids: tuple[int, ...]
    pieces: tuple[str | int, ...] = ()
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands before, between and after the words of replies: one more glue than slots."""

    glue: tuple[str, ...]
    slots: tuple[Slot, ...]
    parts: tuple[Part, ...] = ()
    """The same between control tokens; none where the tokens of the whole would be others."""

    def words(self, replies: Sequence[Message]) -> list[str]:
        """The replies' words as the template shows them."""
        return [replies[s.number].text.strip() if s.trims else replies[s.number].text for s in self.slots]

    def fill(self, words: Sequence[str]) -> tuple[str, list[Characters]]:
        """The text with these words, and where they stand in it."""
        pieces: list[str | int] = [self.glue[0]]
        for number, glue in enumerate(self.glue[1:]):
            pieces += (number, glue)
        return _join(pieces, words, self.slots)

    def spans(self, words: Sequence[str], tokenizer: Tokenizer, control_ids: frozenset[int]) -> list[Span]:
        """Its tokens, of which only those beside the words are found anew."""
        spans: list[Span] = []
        for part in self.parts:
            if part.pieces:
                text, places = _join(part.pieces, words, self.slots)
                add_spans(spans, tokenizer.encode(text), places, control_ids, skip=part.skip)
            else:
                add_span(spans, part.ids, Origin.TEMPLATE)
        return spans

    def in_parts(
        self,
        end: str,
        tokenizer: Tokenizer,
        control_ids: frozenset[int],
        *,
        whole: Callable[[str, list[Characters]], list[Span]],
        tries: Sequence[Sequence[str]],
    ) -> "Frame":
        """The frame with its parts, if with each of these words it has the same tokens in parts as in the `whole`."""
        cut = replace(self, parts=tuple(_parts(self.glue, end, tokenizer)))
        same = (cut.spans(words, tokenizer, control_ids) == whole(*self.fill(words)) for words in tries)
        return cut if all(same) else self


def written_already(tail: str, end: str) -> int:
    """How much of a tail the policy wrote itself: the end token of its message, and white space before it."""
    bare = tail.lstrip() if end else ""
    return len(tail) - len(bare) + len(end) if end and bare.startswith(end) else 0


def _join(pieces: Sequence[str | int], words: Sequence[str], slots: Sequence[Slot]) -> tuple[str, list[Characters]]:
    texts: list[str] = []
    places: list[Characters] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, int):
            text = words[piece]
            if text:
                places.append((at, at + len(text), REPLY_ORIGIN[slots[piece].role]))
        else:
            text = piece
        texts.append(text)
        at += len(text)
    return "".join(texts), places


def _parts(glue: Sequence[str], end: str, tokenizer: Tokenizer) -> list[Part]:
    """Cut at the first and the last control token of each glue: on either side of one, text is encoded apart."""
    skip = written_already(glue[0], end)
    after = end if skip else ""
    parts: list[Part] = []
    open_pieces: list[str | int] = []

    def close(fixed: str) -> None:
        """`fixed` begins with a control token, or is empty."""
        pieces = tuple(piece for piece in open_pieces if piece != "")
        if any(isinstance(piece, int) for piece in pieces):
            before = tokenizer.left_of(after)
            parts.append(Part((), (before, *pieces), skip=1) if before else Part((), pieces))
            pieces, left = (), ""
        else:
            left = after
        text = "".join(str(piece) for piece in pieces) + fixed
        if text:
            parts.append(Part(tuple(tokenizer.encode(text, after=left).ids)))

    for number, text in enumerate((glue[0][skip:], *glue[1:])):
        if number:
            open_pieces.append(number - 1)
        positions = [(text.find(token), token) for token in tokenizer.hard_texts if token in text]
        if not positions:
            open_pieces.append(text)
            continue
        start = min(positions)[0]
        stop, last = max((text.rfind(token) + len(token), token) for _, token in positions)
        open_pieces.append(text[:start])
        close(text[start:stop])
        open_pieces, after = [text[stop:]], last
    close("")
    return parts

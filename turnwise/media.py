"""Images as a model takes them: what its processor made of each, and where they stand among tokens."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def digest_of(content: bytes) -> str:
    """What an image is known by everywhere: the name of its file in a run, the key of its features."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Media:
    """One image, prepared for one model; whoever holds it keeps it alive, and siblings of a group share one.

    `Media("5d41...", b"\\x89PNG...", token_ids=[151655] * 64, takes=[True] * 64, arrays={"pixel_values": ...})`
    """

    digest: str
    """Of `content`."""
    content: bytes
    """The encoded image as it was shown: for engines that prepare images themselves, and for the record."""
    token_ids: NDArray[np.int64]
    """The block of tokens that stands for it, row and column marks included where a model has them."""
    takes: NDArray[np.bool_]
    """Which tokens of the block are replaced by the image's features, in order."""
    arrays: Mapping[str, NDArray[Any]]
    """What the model's processor made of this one image, by the names its `get_image_features` takes."""

    @property
    def features(self) -> int:
        """How many rows of features it has."""
        return int(self.takes.sum())


class _NotPrepared(Mapping[str, NDArray[Any]]):
    """The arrays of an image that a record names: nobody has prepared it here."""

    def __getitem__(self, name: str) -> NDArray[Any]:
        raise RuntimeError("an image of a record is used without having been prepared again")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("an image of a record is used without having been prepared again")

    def __len__(self) -> int:
        return 0


def recorded(digest: str, token_ids: NDArray[np.int64]) -> Media:
    """An image as a record has it: what it is called and its block of tokens. `Ledger.renew` prepares it again."""
    return Media(digest, b"", token_ids, np.zeros(len(token_ids), bool), _NotPrepared())


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An image at its place: its block begins at token `start` of a sequence, or of a batch."""

    media: Media
    start: int

    @property
    def end(self) -> int:
        """The first token behind it."""
        return self.start + len(self.media.token_ids)

    def shifted(self, by: int) -> "MediaSpan":
        """The same image in a sequence that begins elsewhere."""
        return MediaSpan(self.media, self.start + by)


def check_places(spans: Sequence[MediaSpan], token_ids: NDArray[np.int64]) -> None:
    """ValueError unless every image's block stands where its span says, in order and without overlap."""
    before = 0
    for span in spans:
        if span.start < before or span.end > len(token_ids):
            raise ValueError(f"an image at tokens {span.start} to {span.end} of {len(token_ids)}, after {before}")
        if not np.array_equal(token_ids[span.start : span.end], span.media.token_ids):
            raise ValueError(f"the tokens {span.start} to {span.end} are not those of image {span.media.digest}")
        before = span.end


def within(spans: Iterable[MediaSpan], start: int, end: int) -> tuple[MediaSpan, ...]:
    """Those of which any token lies in [start, end), counted from `start`; one that is cut has a part outside."""
    return tuple(span.shifted(-start) for span in spans if span.start < end and span.end > start)

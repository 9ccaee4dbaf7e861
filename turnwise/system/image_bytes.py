"""An image by its bytes: digest, media type, file ending and data URL; one rule for all rooms."""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.ledger import Media

_MAGIC = {
    "image/png": rb"\x89PNG\r\n\x1a\n",
    "image/jpeg": rb"\xff\xd8\xff",
    "image/gif": rb"GIF8[79]a",
    "image/webp": rb"RIFF....WEBP",
    "image/bmp": rb"BM",
}
KINDS = "PNG, JPEG, GIF, WebP or BMP"
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
"""The same for Pillow, which may open no others: they start programs, or read further files."""
ENDINGS = ("png", "jpg", "gif", "webp", "bmp")
"""What `file_ending` gives."""


def media_type(content: bytes) -> str | None:
    """`image/png`; None for what is no image. The first 16 bytes are enough."""
    return next((kind for kind, magic in _MAGIC.items() if re.match(magic, content, re.DOTALL)), None)


def file_ending(content: bytes) -> str | None:
    """`png`; None for what is no image."""
    kind = media_type(content)
    return None if kind is None else dict(zip(_MAGIC, ENDINGS, strict=True))[kind]


def data_url(content: bytes) -> str | None:
    """The image inside a URL; None for what is no image."""
    kind = media_type(content)
    return None if kind is None else f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def digest_of(content: bytes) -> str:
    """What an image is known by everywhere: the name of its file in a run, the key of its features."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


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

"""What the bytes of an image are, by how they begin: media type, file ending and data URL; one rule for all rooms."""

import base64
import re

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

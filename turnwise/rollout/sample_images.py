"""A sample's image as pixels for the tools that look at it, and pixels as a tool's result; both bounded in size."""

import base64
import binascii
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from turnwise.errors import EpisodeError, ToolError
from turnwise.image_bytes import KINDS, data_url, media_type
from turnwise.rollout.tools.tool import ToolContext
from turnwise.types import Image, ToolResult

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MOST_BYTES = 50_000_000
MOST_PIXELS = 64_000_000
"""Of an image that is unpacked: a small file may unfold into more memory than there is."""
LONGEST_SIDE = 1280
"""Pixels of an image that goes back to the model; a longer one is made smaller."""


def read_picture(context: ToolContext, number: int) -> "Picture":
    """One of the sample's images, or the one that its `create_kwargs` name for this tool.

    ToolError for a number that there is not; EpisodeError for an image that cannot be used, which is the row's fault.
    """
    import PIL.Image

    sources = [image.source for image in context.sample.images]
    own = context.kwargs.get("create_kwargs", {}).get("image")
    if own is not None:
        sources = [_source(own)]
    if not sources:
        raise ToolError("there is no image in this conversation")
    if number >= len(sources):
        raise ToolError(f"there is no image {number}: they are numbered from 0 to {len(sources) - 1}")
    content = _content(sources[number], number)
    try:
        with PIL.Image.open(io.BytesIO(content)) as found:
            if found.width * found.height > MOST_PIXELS:  # read from its head; nothing is unpacked yet
                raise EpisodeError(f"image {number} of the sample has {found.width}x{found.height} pixels: too many")
            return found.convert("RGB")
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise EpisodeError(f"image {number} of the sample cannot be read: {error}") from error


def as_result(words: str, picture: "Picture", facts: dict[str, Any]) -> ToolResult:
    """An image for the model, as PNG in a data URL."""
    if max(picture.size) > LONGEST_SIDE:
        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    held = io.BytesIO()
    picture.save(held, "png")
    url = data_url(held.getvalue())
    assert url is not None
    return ToolResult(words, (Image(url),), info={**facts, "size": list(picture.size)})


def _source(own: Any) -> str:
    """A path, a data URL, or one of the two as {"image": ...}, as verl's rows have it."""
    if isinstance(own, dict):
        own = own.get("image", own.get("path"))
    if not isinstance(own, str):
        raise EpisodeError("create_kwargs.image is a path or a data URL")
    return own.removeprefix("file://")


def _content(source: str, number: int) -> bytes:
    try:
        if source.startswith("data:"):
            head, _, data = source.partition(",")
            content = base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
        elif source.startswith(("http:", "https:")):
            raise EpisodeError(f"image {number} of the sample is an address: rows name files, nothing is fetched")
        else:
            content = _file(Path(source))
    except (OSError, ValueError, binascii.Error) as error:
        raise EpisodeError(f"image {number} of the sample cannot be read: {error}") from error
    if media_type(content) is None:
        raise EpisodeError(f"image {number} of the sample is not {KINDS}")
    return content


def _file(path: Path) -> bytes:
    if not path.is_file():  # a pipe would hold us
        raise FileNotFoundError(f"{path} is no file")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES} bytes")
    return path.read_bytes()

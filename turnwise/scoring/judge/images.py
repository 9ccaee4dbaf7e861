"""Images as data URLs, scaled down to what a judge needs."""

import base64
import io
import math
from typing import TYPE_CHECKING

from turnwise.errors import ConfigError, DataError, ScoringFailed
from turnwise.image_bytes import FORMATS
from turnwise.image_sources import read_source
from turnwise.types import Image

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_SOURCE_PIXELS = 100_000_000
"""A larger image is not decoded: its memory would be the host's."""
QUALITY = 90


def data_url(image: Image, max_pixels: int) -> str:
    """The image as a JPEG in a data URL, with at most this many pixels; transparent parts become white."""
    try:
        from PIL import Image as pillow
        from PIL import ImageOps
    except ModuleNotFoundError as error:
        raise ConfigError("showing images to a judge needs Pillow: pip install pillow") from error

    content = _content(image)
    try:
        with pillow.open(io.BytesIO(content), formats=(*FORMATS, "TIFF")) as picture:
            if picture.width * picture.height > MAX_SOURCE_PIXELS:
                raise ScoringFailed(f"{_name(image)} is too large to be shown: {picture.width} x {picture.height}")
            if picture.format == "JPEG":
                picture.draft("RGB", fitting(*picture.size, max_pixels))  # decoded at a fraction of its size
            flat = _on_white(ImageOps.exif_transpose(picture))  # upright, as the policy saw it
    except ScoringFailed:
        raise
    except Exception as error:  # a stranger's bytes: its decoders raise whatever they stumble over
        raise ScoringFailed(f"{_name(image)} cannot be read: {error}") from error
    size = fitting(*flat.size, max_pixels)
    if size != flat.size:
        flat = flat.resize(size, pillow.Resampling.LANCZOS)
    buffer = io.BytesIO()
    flat.save(buffer, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def fitting(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The size with at most this many pixels and the same shape; never larger than it was."""
    if width * height <= max_pixels:
        return width, height
    factor = math.sqrt(max_pixels / (width * height))
    wide = min(max(1, int(width * factor)), max_pixels)
    return wide, min(max(1, int(height * factor)), max_pixels // wide)


def _on_white(picture: "Picture") -> "Picture":
    from PIL import Image as pillow

    if "A" in picture.getbands() or "transparency" in picture.info:
        clear = picture.convert("RGBA")
        white = pillow.new("RGBA", clear.size, "white")
        return pillow.alpha_composite(white, clear).convert("RGB")
    return picture.convert("RGB")


def _content(image: Image) -> bytes:
    source = image.source
    if source.startswith(("http://", "https://")):
        raise DataError(f"{_name(image)}: images are not fetched; give a file or a data URL")
    try:
        return read_source(source)
    except DataError as error:
        raise ScoringFailed(str(error)) from error


def _name(image: Image) -> str:
    return f"the image {image.source[:80]}"

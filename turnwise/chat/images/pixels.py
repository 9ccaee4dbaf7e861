"""Encoded images as the pixels a model is shown: upright, in RGB, bounded in size, the same however they are stored."""

import io
import math
import struct
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from turnwise.errors import DataError, one_line
from turnwise.system.image_bytes import FORMATS, KINDS, media_type

if TYPE_CHECKING:
    from PIL.Image import Exif
    from PIL.Image import Image as Picture

MOST_BYTES = 50_000_000
MOST_PIXELS = 64_000_000
"""Of an image that is unpacked: a small file may unfold into more memory than there is."""
ORIENTATION = 0x0112


class DecodedImage(NamedTuple):
    """A picture in RGB, and its bytes: those that were given where every reader makes the same pixels of them."""

    picture: "Picture"
    content: bytes


def unpack(content: bytes, max_pixels: int | None) -> DecodedImage:
    """An image as it is shown; one of more than `max_pixels` is made smaller. DataError says what is wrong with it.

    Of an animation the first frame is shown; what is transparent stands on white.
    """
    import PIL.Image

    if len(content) > MOST_BYTES:
        raise DataError(f"an image of {len(content)} bytes: at most {MOST_BYTES} are read")
    if media_type(content) is None:
        raise DataError(f"it is not {KINDS}")
    try:
        with PIL.Image.open(io.BytesIO(content), formats=FORMATS) as source:
            width, height = source.size
            _check_size(width, height)  # read from its head; nothing is unpacked yet
            turned = source.getexif().get(ORIENTATION, 1) in range(2, 9)
            source.load()
            picture, mended = _in_rgb(source)
    except DataError:
        raise
    except Exception as error:  # a stranger's bytes: its decoders raise whatever they stumble over
        raise _unreadable(error) from error
    if turned:
        picture, mended = _upright(picture, source), True
    if max_pixels is not None and picture.width * picture.height > max_pixels:
        picture, mended = picture.resize(_smaller(picture.size, max_pixels), PIL.Image.Resampling.BICUBIC), True
    return DecodedImage(picture, _as_png(picture) if mended else content)


def upright(content: bytes) -> bytes:
    """The image for readers that know nothing of notes on how it lies: its own bytes unless it has one."""
    import PIL.Image

    file = io.BytesIO(content)
    try:
        with PIL.Image.open(file, formats=FORMATS) as image:
            turned = _notes(image, file).get(ORIENTATION, 1) in range(2, 9)
    except Exception:  # a stranger's bytes, which are the reader's affair
        return content
    return unpack(content, None).content if turned else content


def shown_size(file: BinaryIO, max_pixels: int | None) -> tuple[int, int]:
    """(width, height) of an image as it is shown, read from its head; DataError for what is none."""
    import PIL.Image

    try:
        with PIL.Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            _check_size(width, height)
            if _notes(image, file).get(ORIENTATION, 1) in range(5, 9):  # it lies on its side
                width, height = height, width
    except DataError:
        raise
    except Exception as error:  # a stranger's bytes: its decoders raise whatever they stumble over
        raise _unreadable(error) from error
    if max_pixels is not None and width * height > max_pixels:
        return _smaller((width, height), max_pixels)
    return width, height


def _unreadable(error: Exception) -> DataError:
    import PIL

    why = f"it does not begin as {KINDS} do" if isinstance(error, PIL.UnidentifiedImageError) else one_line(error)
    return DataError(f"the image cannot be read: {why}")


def _notes(image: "Picture", file: BinaryIO) -> "Exif":
    """What it says of itself. Pillow unpacks the whole of a PNG to see what follows its pixels, which is seldom
    anything."""
    import PIL.Image

    return PIL.Image.Image.getexif(image) if image.format == "PNG" and not _goes_on(file) else image.getexif()


def _goes_on(file: BinaryIO) -> bool:
    """Whether a PNG has words behind its pixels."""
    at, behind = file.tell(), False
    file.seek(8)
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        behind = behind or kind == b"IDAT"
        if behind and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            break
        file.seek(length + 4, io.SEEK_CUR)
    file.seek(at)
    return len(head) == 8


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise DataError(f"an image of {width}x{height} pixels: at most {MOST_PIXELS} are unpacked")


def _in_rgb(image: "Picture") -> tuple["Picture", bool]:
    """(the picture in RGB, whether readers may differ in how they make it so)."""
    import PIL.Image

    if image.mode.startswith(("I", "F")):  # 16 bits a pixel, which a plain conversion would clip to white
        values = np.clip(np.asarray(image, np.float64) / 256, 0, 255).astype(np.uint8)
        return PIL.Image.fromarray(values).convert("RGB"), True
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        ground = PIL.Image.new("RGBA", layer.size, "white")
        return PIL.Image.alpha_composite(ground, layer).convert("RGB"), True
    return image.convert("RGB"), False


def _upright(picture: "Picture", source: "Picture") -> "Picture":
    from PIL.Image import Transpose

    how = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
    }  # fmt: skip
    return picture.transpose(how[source.getexif()[ORIENTATION]])


def _smaller(size: tuple[int, int], max_pixels: int) -> tuple[int, int]:
    """The size of the same shape with at most that many pixels; a side is never less than one."""
    width, height = size
    scale = math.sqrt(max_pixels / (width * height))
    wide, high = max(1, int(width * scale)), max(1, int(height * scale))
    return min(wide, max(1, max_pixels // high)), min(high, max(1, max_pixels // wide))


def _as_png(picture: "Picture") -> bytes:
    held = io.BytesIO()
    picture.save(held, "png", compress_level=1)
    return held.getvalue()

"""Raw pixels, as L, RGB or RGBA, of PIL images, arrays and figures."""

import builtins
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}


class ImageRefused(Exception):
    """An image that is not given back, with the reason as a notice."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """Rows from the top, channels interleaved."""

    mode: str
    size: tuple[int, int]
    data: bytes
    plain: bytes | None = None
    """The same without an alpha channel that is opaque everywhere."""

    def looks_like(self, other: "Pixels") -> bool:
        """The same picture, perhaps with an alpha channel that does nothing."""
        ours, theirs = self.plain or self.data, other.plain or other.data
        return self.size == other.size and len(ours) == len(theirs) and ours == theirs


def pixels_of_image(image: Any) -> Pixels:
    """Of a PIL image in any mode. Its file is decoded now, which can fail."""
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # PIL's decoders raise anything on a broken file
        raise ImageRefused(f"not a readable image ({type(error).__name__})") from error
    mode = image.mode
    if mode in ("P", "PA", "LA", "La", "RGBa"):
        image = image.convert("RGBA" if mode != "P" or "transparency" in image.info else "RGB")
    elif mode.startswith("I;16") or mode in ("I", "F"):
        image = grey(image)
    elif mode not in ("L", "RGB", "RGBA"):
        image = image.convert("L" if mode == "1" else "RGB")
    plain = None
    if image.mode == "RGBA" and image.getchannel("A").getextrema()[0] == 255:
        plain = image.convert("RGB").tobytes()
    return Pixels(image.mode, image.size, image.tobytes(), plain)


def grey(image: Any) -> Any:
    """Numbers of a wide range as 0..255: fractions and 16 bits are scaled, anything else is stretched."""
    image = image if image.mode == "F" else image.convert("I")
    low, high = image.getextrema()
    if low >= 0 and high <= 1 and image.mode == "F":
        scale, offset = 255.0, 0.0
    elif low >= 0 and high <= 255:
        scale, offset = 1.0, 0.0
    elif low >= 0 and high <= 65535 and image.mode == "I":
        scale, offset = 1 / 257, 0.0
    else:
        span = float(high) - float(low)
        scale = 255 / span if span > 0 else 0.0
        offset = -float(low) * scale
    return image.convert("F").point(lambda value: value * scale + offset).convert("L")


def pixels_of_array(array: Any) -> Pixels:
    """Of an array of height x width, or with 1, 3 or 4 channels; fractions are 0..1, other numbers 0..255."""
    numpy: Any = sys.modules["numpy"]
    channels = 1 if array.ndim == 2 else array.shape[2]
    if channels not in CHANNELS:
        raise ValueError(f"show() takes arrays with 1, 3 or 4 channels, not of the shape {array.shape}")
    if array.dtype == bool:
        array = array * numpy.uint8(255)
    elif array.dtype.kind == "f":
        array = numpy.nan_to_num(array.astype(numpy.float32), nan=0.0)
        array = numpy.rint(numpy.clip(array * (255.0 if array.max() <= 1 else 1.0), 0, 255)).astype(numpy.uint8)
    elif array.dtype.kind in "iu" and array.dtype != numpy.uint8:
        array = numpy.clip(array, 0, 255).astype(numpy.uint8)
    elif array.dtype != numpy.uint8:
        raise ValueError(f"show() takes arrays of numbers, not of {array.dtype}")
    size = (int(array.shape[1]), int(array.shape[0]))
    plain = None
    if channels == 4 and array[..., 3].min() == 255:
        plain = array[..., :3].tobytes()
    return Pixels(CHANNELS[channels], size, array.tobytes(), plain)


def pixels_of_figure(figure: Any) -> Pixels:
    """Of a matplotlib figure, drawn by Agg at its own size."""
    numpy: Any = sys.modules["numpy"]
    agg: Any = import_module("matplotlib.backends.backend_agg")
    before = figure.canvas
    canvas = before if isinstance(before, agg.FigureCanvasAgg) else agg.FigureCanvasAgg(figure)
    try:
        canvas.draw()
        array = numpy.asarray(canvas.buffer_rgba())
    finally:
        if canvas is not before:
            figure.set_canvas(before)
    if array[..., 3].min() == 255:
        array = array[..., :3]
    return Pixels("RGB" if array.shape[2] == 3 else "RGBA", (array.shape[1], array.shape[0]), array.tobytes())

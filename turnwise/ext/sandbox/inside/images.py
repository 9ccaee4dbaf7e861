"""Images into a session and out of it: given as copies, shown, drawn by matplotlib, or saved as files."""

import builtins
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from mmap import mmap
from os import O_CLOEXEC, O_CREAT, O_EXCL, O_NOFOLLOW, O_NONBLOCK, O_RDONLY, O_WRONLY, close, fdopen, fstat, scandir
from stat import S_ISREG
from typing import Any

from turnwise.data.images.provenance import IDENTITY, Trail
from turnwise.ext.sandbox.inside.arrays import trail_of_array
from turnwise.ext.sandbox.inside.image_trails import files, identity, mark, trail_of
from turnwise.ext.sandbox.inside.pixels import ImageRefused, Pixels, pixels_of_array, pixels_of_figure, pixels_of_image

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MOST_FILES = 4096
"""Entries of the folder that are looked at after a call."""
MOST_SIDE = 1 << 20
NOTHING: dict[str, Any] = {"source": None, "box": None, "frame": None, "steps": []}

modules = sys.modules


def is_a(value: Any, module: str, name: str) -> bool:
    """Whether a value is of a class of a package, which need not be loaded."""
    cls = getattr(modules.get(module), name, None)
    return isinstance(cls, type) and isinstance(value, cls)


def figure_of(value: Any) -> Any:
    """The matplotlib figure that a value is, or is an axes of."""
    if is_a(value, "matplotlib.figure", "Figure"):
        return value
    if is_a(value, "matplotlib.axes", "Axes"):
        return value.get_figure()
    return None


class Gallery:
    """The images that one call gives back."""

    def __init__(self, images: int, pixels: int, scratch: str) -> None:
        self._most = images
        self._most_pixels = pixels
        self._scratch = scratch
        self._known: dict[str, tuple[int, int, int, int]] = {}
        self.begin()

    def begin(self) -> None:
        """Empties the gallery for a new call."""
        self._pictures: list[dict[str, Any]] = []
        self._kept: list[Pixels] = []
        self._pixels = 0
        self._left_out = 0
        self._notices: list[str] = []

    def show(self, *values: Any) -> None:
        """Give images back: PIL images, arrays (height x width, or with 3 or 4 channels), matplotlib figures."""
        for value in values:
            if not self._take("show", value) and not self._take_array(value):
                raise TypeError(f"show() takes images, arrays and figures, not {type(value).__name__}")

    def show_figures(self) -> None:
        """`plt.show()`: all open figures, which are closed then."""
        pyplot = modules["matplotlib.pyplot"]
        for number in pyplot.get_fignums():
            self._take("figure", pyplot.figure(number))
        pyplot.close("all")

    def offer(self, value: Any) -> bool:
        """Take the last expression if it is an image or a figure."""
        return self._take("value", value)

    def _take(self, name: str, value: Any) -> bool:
        if is_a(value, "PIL.Image", "Image"):
            self.add(name, value.size, lambda: pixels_of_image(value), trail_of(value).report(value.size))
            return True
        figure = figure_of(value)
        if figure is None:
            return False
        size = (int(figure.bbox.width), int(figure.bbox.height))
        self.add("figure" if name == "show" else name, size, lambda: pixels_of_figure(figure), NOTHING)
        pyplot = modules.get("matplotlib.pyplot")
        if pyplot is not None:
            pyplot.close(figure)
        return True

    def _take_array(self, value: Any) -> bool:
        if not is_a(value, "numpy", "ndarray"):
            return False
        if value.ndim not in (2, 3):
            raise ValueError(f"show() takes arrays of 2 or 3 dimensions, not of the shape {value.shape}")
        size = (value.shape[1], value.shape[0])
        self.add("show", size, lambda: pixels_of_array(value), trail_of_array(value).report(size))
        return True

    def add(self, name: str, size: tuple[int, int], read: Any, provenance: dict[str, Any]) -> None:
        """Keep an image within the limits; `read` gives its pixels."""
        area = size[0] * size[1]
        if not 0 < min(size) <= max(size) < MOST_SIDE:
            self._notices.append(f"an image of {size[0]} x {size[1]} pixels was left out")
            return
        if len(self._pictures) >= self._most or self._pixels + area > self._most_pixels:
            self._left_out += 1
            return
        try:
            pixels: Pixels = read()
        except ImageRefused as error:
            self._notices.append(f"{name}: {error}")
            return
        if any(pixels.looks_like(other) for other in self._kept):
            return
        self._kept.append(pixels)
        self._pixels += area
        self._pictures.append(
            {
                "name": name,
                "mode": pixels.mode,
                "size": list(pixels.size),
                "length": len(pixels.data),
                "provenance": provenance,
            }
        )

    def known(self, name: str, status: os.stat_result) -> None:
        """A file that the code did not write."""
        self._known[name] = identity(status)

    def collect(self) -> None:
        """Take the image files that appeared or changed since the last call."""
        changed = []
        with scandir(self._scratch) as entries:
            for count, entry in enumerate(entries):
                if count >= MOST_FILES:
                    self._notices.append(f"more than {MOST_FILES} files: not all were looked at")
                    break
                if entry.name.lower().endswith(SUFFIXES):
                    status = entry.stat(follow_symlinks=False)
                    if S_ISREG(status.st_mode) and self._known.get(entry.name) != identity(status):
                        changed.append((status.st_mtime_ns, entry.name))
        for _, name in sorted(changed):
            self._collect_file(name)

    def _collect_file(self, name: str) -> None:
        descriptor = os.open(f"{self._scratch}/{name}", O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)
        with fdopen(descriptor, "rb") as file:
            status = fstat(descriptor)
            self._known[name] = identity(status)
            try:
                image = opened(file)
            except ImageRefused as error:
                self._notices.append(f"{name}: {error}")
                return
            trail = files.find(status) or Trail()
            self.add(name, image.size, lambda: pixels_of_image(image), trail.report(image.size))

    def summary(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The images for the reply's header, and what was left out."""
        notices = list(self._notices[:16])
        if self._left_out:
            notices.append(
                f"{self._left_out} images left out: a call gives back at most {self._most} images "
                f"and {self._most_pixels} pixels"
            )
        return self._pictures, notices

    def blobs(self) -> list[bytes]:
        """The pixel bytes of the call's images, in order."""
        return [pixels.data for pixels in self._kept]


def opened(file: Any) -> Any:
    """Open an image file without decoding it. Its size is not checked here."""
    try:
        module: Any = modules.get("PIL.Image") or import_module("PIL.Image")
    except ImportError as error:
        raise ImageRefused("Pillow is needed to read it") from error
    limit, module.MAX_IMAGE_PIXELS = module.MAX_IMAGE_PIXELS, None  # the callers check, without an exception
    try:
        return module.open(file)
    except MemoryError:
        raise
    except Exception as error:  # PIL's readers raise anything on a broken file
        raise ImageRefused(f"not a readable image ({type(error).__name__})") from error
    finally:
        module.MAX_IMAGE_PIXELS = limit


def itself(image: Any) -> Any:
    """What a pickled RawImage comes back as."""
    return image


def raw_image(mode: str, size: tuple[int, ...] | None, data: bytes | mmap) -> Any:
    """An image of raw pixels, which are taken over when they are used."""
    try:
        module: Any = import_module("PIL.ImageFile")
    except ImportError as error:
        raise ImageRefused("Pillow is needed to read it") from error

    class RawImage(module.ImageFile):  # type: ignore[misc]
        """A format of PIL without a header."""

        format = None

        def _open(self) -> None:
            self._mode, self._size = mode, size
            self.tile = [("raw", (0, 0, *self.size), 0, (mode, 0, 1))]

        def __reduce_ex__(self, protocol: Any) -> Any:
            return itself, (self.copy(),)

    return RawImage(BytesIO(data) if isinstance(data, bytes) else data)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image given to the session: the content of a file, or raw pixels when there is a mode."""

    name: str
    data: bytes | mmap
    """Raw pixels may stay where they are until they are used."""
    mode: str | None
    size: tuple[int, ...] | None

    def image(self) -> Any:
        """A new image of it; a file is decoded when its pixels are used."""
        mode = self.mode
        image = opened(BytesIO(self.data)) if mode is None else raw_image(mode, self.size, self.data)
        mark(image, Trail(self.name, image.size, IDENTITY))
        return image


class Images(dict[str, Any]):
    """The variable `images`: each access gives a copy, so that what was given stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._decoded: dict[str, Any] = {}

    def give(self, source: "ImageSource") -> None:
        """Add an image of which the code gets copies."""
        self[source.name] = source

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if not isinstance(value, ImageSource):
            return value
        if name not in self._decoded:
            self._decoded[name] = value.image()
        return self._decoded[name].copy()

    def __setitem__(self, name: str, value: Any) -> None:
        self._decoded.pop(name, None)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return f"images({', '.join(map(repr, self))})"

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


class Inputs:
    """The images that were given to the session, in order."""

    def __init__(self, gallery: Gallery, scratch: str) -> None:
        self._gallery = gallery
        self._scratch = scratch
        self._images = Images()
        self._count = 0
        self.mapped = 0
        """Sources that hold a descriptor."""
        self._first_file: str | None = None

    def install(self, sources: list[ImageSource], namespace: dict[str, Any]) -> list[str]:
        """Write the files and set the variables; notices about what cannot be used."""
        notices = []
        namespace["images"] = self._images
        for source in sources:
            try:
                self._install(source, namespace)
            except ImageRefused as error:
                notices.append(f"{source.name}: {error}")
        return notices

    def _install(self, source: ImageSource, namespace: dict[str, Any]) -> None:
        number = self._count
        self._count += 1
        self.mapped += not isinstance(source.data, bytes)
        status = self._write(source) if source.mode is None else None
        if status is not None and self._first_file is None:
            self._first_file = source.name
            namespace["image_filename"] = namespace["image_path"] = source.name
        image = source.image()
        if status is not None:
            files.add(status, trail_of(image))
            files.add_content(bytes(source.data), trail_of(image))
        namespace[f"img{number}"] = image
        self._images.give(source)

    def _write(self, source: ImageSource) -> os.stat_result:
        """A copy that cannot be written to; a link of that name is replaced, never followed."""
        path = f"{self._scratch}/{source.name}"
        try:
            if os.path.lexists(path):
                os.unlink(path)
            descriptor = os.open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0o444)
            try:
                view = memoryview(source.data)
                while view:
                    view = view[os.write(descriptor, view) :]
                status = fstat(descriptor)
            finally:
                close(descriptor)
        except OSError as error:
            raise ImageRefused(f"the file could not be written ({error.strerror})") from error
        self._gallery.known(source.name, status)
        return status

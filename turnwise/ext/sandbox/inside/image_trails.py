"""Images of a session carry their trails: on PIL's images, and for files by what is in them."""

import builtins
from enum import Enum
from io import BytesIO
from math import isfinite
from os import stat, stat_result
from typing import Any

from turnwise.data.images.provenance import UNKNOWN, Trail

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

MAX_ARGUMENTS = 1000
"""Characters of the arguments of one step; longer ones are not told."""
MAX_FILES = 256
ATTRIBUTE = "_trail"

Identity = tuple[int, int, int, int]


def short(value: Any, depth: int = 0) -> Any:
    """An argument of a step as JSON, bounded."""
    if isinstance(value, Enum):
        return value.name[:80]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**53) < value < 2**53 else "int"
    if isinstance(value, float):
        return float(value) if isfinite(value) else "float"
    if isinstance(value, str):
        return str.__str__(value)[:80]
    if isinstance(value, tuple | list) and depth < 2:
        return [short(item, depth + 1) for item in list(value)[:8]]
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return short(value.item(), 2)
    return str(getattr(value, "__name__", None) or type(value).__name__)[:80]


def shortened(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as a step shows them."""
    texts = {str(name)[:40]: short(value) for name, value in list(arguments.items())[:8]}
    return texts if len(ascii(texts)) <= MAX_ARGUMENTS else {}


def trail_of(image: Any) -> Trail:
    """The trail that an image carries; UNKNOWN where it has none."""
    trail = getattr(image, ATTRIBUTE, None)
    return trail if isinstance(trail, Trail) else UNKNOWN


def mark(image: Any, trail: Trail) -> None:
    """Attaches a trail to an image."""
    image.__dict__[ATTRIBUTE] = trail


def identity(status: stat_result) -> Identity:
    """Differs whenever a file was replaced or altered."""
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Files:
    """Trails of images on disk, for as long as the files are the ones that were written."""

    def __init__(self) -> None:
        self._trails: dict[Identity, Trail] = {}
        self._contents: list[tuple[bytes, Trail]] = []

    def add_content(self, content: bytes, trail: Trail) -> None:
        """A file was given; the code may read it itself and open the bytes."""
        self._contents.append((content, trail))

    def add(self, status: stat_result, trail: Trail) -> None:
        """Notes the trail of a file that was written; the oldest is dropped when there are too many."""
        self._trails[identity(status)] = trail
        if len(self._trails) > MAX_FILES:
            del self._trails[next(iter(self._trails))]

    def add_path(self, path: Any, trail: Trail) -> None:
        """An image was saved; anything but a path of an existing file is of no interest."""
        try:
            self.add(stat(path), trail)
        except (OSError, TypeError, ValueError):
            return

    def find(self, status: stat_result) -> Trail | None:
        """The trail of a file's content."""
        return self._trails.get(identity(status))

    def find_path(self, path: Any) -> Trail | None:
        """The trail of what `Image.open` was given: a path, or a file object."""
        try:
            if isinstance(path, BytesIO):
                return self.find_content(path.getbuffer())
            number = path.fileno() if hasattr(path, "fileno") else path
            return self.find(stat(number))
        except (OSError, TypeError, ValueError):
            return None

    def find_content(self, content: memoryview) -> Trail | None:
        """The trail of a given file, by its bytes."""
        for earlier, trail in self._contents:
            if len(earlier) == len(content) and earlier == content:
                return trail
        return None


files = Files()
"""Of this process: a session has one set of files."""

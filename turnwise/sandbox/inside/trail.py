"""Where an image came from: its source, the part of it that it shows, and the steps, carried along by PIL's images."""

import builtins
from enum import Enum
from io import BytesIO
from math import isfinite
from os import stat, stat_result
from typing import Any

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

MAX_STEPS = 32
MAX_ARGUMENTS = 1000
"""Characters of the arguments of one step; longer ones are not told."""
MAX_FILES = 256
ATTRIBUTE = "_trail"

Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): the pixel (x, y) of an image shows (a x + b y + c, d x + e y + f) of its source."""
IDENTITY: Matrix = (1, 0, 0, 0, 1, 0)
Step = tuple[str, dict[str, Any]]
Identity = tuple[int, int, int, int]


class Trail:
    """The past of one image. Never altered: a step makes another trail."""

    __slots__ = ("matrix", "source", "source_size", "steps")

    def __init__(
        self,
        source: str | None = None,
        source_size: tuple[int, int] | None = None,
        matrix: Matrix | None = None,
        steps: tuple[Step, ...] = (),
    ) -> None:
        self.source = source
        self.source_size = source_size
        self.matrix = matrix
        self.steps = steps

    def __reduce__(self) -> tuple[Any, ...]:
        return Trail, (self.source, self.source_size, self.matrix, self.steps)

    def after(self, name: str, arguments: dict[str, Any], change: Matrix | None) -> "Trail":
        """With one more step; `change` leads from the pixels of the new image to those of the present one."""
        steps = self.steps
        if len(steps) >= MAX_STEPS:
            steps = steps[: MAX_STEPS // 2] + steps[MAX_STEPS // 2 + 1 :]
        return Trail(self.source, self.source_size, composed(self.matrix, change), (*steps, (name[:80], arguments)))

    def frame(self, size: tuple[int, int]) -> list[float] | None:
        """The rectangle of the source's plane that an image of this size shows; None when it is none."""
        if self.matrix is None or self.source_size is None:
            return None
        a, b, c, d, e, f = self.matrix
        if (b or d) and (a or e):
            return None
        width, height = size
        left, right = sorted((c, a * width + b * height + c))
        upper, lower = sorted((f, d * width + e * height + f))
        return [tidy(left), tidy(upper), tidy(right), tidy(lower)]

    def box(self, size: tuple[int, int]) -> list[float] | None:
        """What of that lies on the source; None when nothing does."""
        frame = self.frame(size)
        if frame is None or self.source_size is None:
            return None
        left, right = (min(max(x, 0), self.source_size[0]) for x in frame[::2])
        upper, lower = (min(max(y, 0), self.source_size[1]) for y in frame[1::2])
        if left >= right or upper >= lower:
            return None
        return [left, upper, right, lower]

    def report(self, size: tuple[int, int]) -> dict[str, Any]:
        """As it goes to the host."""
        steps = [{"name": name, "arguments": arguments} for name, arguments in self.steps]
        return {"source": self.source, "box": self.box(size), "frame": self.frame(size), "steps": steps}


UNKNOWN = Trail()


def tidy(number: float) -> float:
    """Without the noise of floating-point arithmetic."""
    return round(number, 3)


def composed(outer: Matrix | None, inner: Matrix | None) -> Matrix | None:
    """First inner, then outer."""
    if outer is None or inner is None:
        return None
    if inner == IDENTITY:
        return outer
    a, b, c, d, e, f = outer
    g, h, i, j, k, m = inner
    return (a * g + b * j, a * h + b * k, a * i + b * m + c, d * g + e * j, d * h + e * k, d * i + e * m + f)


def scaled(box: tuple[float, ...], size: tuple[int, int]) -> Matrix | None:
    """A box of an image, shown by an image of that size."""
    left, upper, right, lower = box
    if not size[0] or not size[1]:
        return None
    return ((right - left) / size[0], 0, left, 0, (lower - upper) / size[1], upper)


def turned(method: int, size: tuple[int, int]) -> Matrix | None:
    """PIL's transpositions of an image of that size."""
    width, height = size
    matrices: tuple[Matrix, ...] = (
        (-1, 0, width, 0, 1, 0),  # FLIP_LEFT_RIGHT
        (1, 0, 0, 0, -1, height),  # FLIP_TOP_BOTTOM
        (0, -1, width, 1, 0, 0),  # ROTATE_90
        (-1, 0, width, 0, -1, height),  # ROTATE_180
        (0, 1, 0, -1, 0, height),  # ROTATE_270
        (0, 1, 0, 1, 0, 0),  # TRANSPOSE
        (0, -1, width, -1, 0, height),  # TRANSVERSE
    )
    return matrices[method] if 0 <= method < len(matrices) else None


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
    found = {str(name)[:40]: short(value) for name, value in list(arguments.items())[:8]}
    return found if len(ascii(found)) <= MAX_ARGUMENTS else {}


def trail_of(image: Any) -> Trail:
    """The trail an image carries."""
    found = getattr(image, ATTRIBUTE, None)
    return found if isinstance(found, Trail) else UNKNOWN


def mark(image: Any, trail: Trail) -> None:
    """Let an image carry a trail."""
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
        """A file was written."""
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
                return self._find_content(path.getbuffer())
            number = path.fileno() if hasattr(path, "fileno") else path
            return self.find(stat(number))
        except (OSError, TypeError, ValueError):
            return None

    def _find_content(self, content: memoryview) -> Trail | None:
        for known, trail in self._contents:
            if len(known) == len(content) and known == content:
                return trail
        return None


files = Files()
"""Of this process: a session has one set of files."""

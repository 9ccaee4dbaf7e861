"""How an image was made from another: its source, the part of it that it shows, and the steps.

The sandbox carries trails along inside its sessions: this file needs the standard library only.
"""

import builtins
from enum import StrEnum
from typing import Any

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in a session may replace those of all modules

MAX_STEPS = 32
Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): the pixel (x, y) of an image shows (a x + b y + c, d x + e y + f) of its source."""
IDENTITY: Matrix = (1, 0, 0, 0, 1, 0)
Step = tuple[str, dict[str, Any]]


class OriginCheck(StrEnum):
    """What the host found when it compared a claim about an image's origin with the pixels."""

    VERIFIED = "verified"
    """The image shows that part of that source."""
    UNVERIFIED = "unverified"
    """Nothing is claimed, or nobody could tell."""
    CONTRADICTED = "contradicted"
    """The image shows something else."""


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
        """The trail as values of JSON, for the host."""
        steps = [{"name": name, "arguments": arguments} for name, arguments in self.steps]
        return {"source": self.source, "box": self.box(size), "frame": self.frame(size), "steps": steps}


UNKNOWN = Trail()


def tidy(number: float) -> float:
    """Without the noise of floating-point arithmetic."""
    return round(number, 3)


def composed(outer: Matrix | None, inner: Matrix | None) -> Matrix | None:
    """The matrix that applies `inner` first and `outer` then; None if either is unknown."""
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

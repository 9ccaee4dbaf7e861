"""The trail of an image through numpy: where the pixels of an array stand in an image, or in another array."""

import builtins
from collections import deque
from functools import wraps
from typing import Any
from weakref import ref

from turnwise.data.images.provenance import Matrix, Trail
from turnwise.ext.sandbox.inside.image_trails import mark, trail_of

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

recent: deque[tuple[int, dict[str, Any], Trail]] = deque(maxlen=2)
"""(id, pixels, trail) of images that were made into arrays lately: a part of such an array is recognised when it
becomes an image again, even when the image itself was closed."""
RECENT_PIXELS = 4_000_000
LEAST_COPIED = 64
"""Pixels below which a copy proves nothing: a few even ones stand everywhere."""
LOOKED_AT = 4
"""Arrays, the newest first, in which a copied part is looked for."""
TRIES = 64
"""Places in one of them at which a row of the copy stands before it is given up."""


class ArrayTrails:
    """Trails of arrays that functions of images gave, for as long as the arrays live."""

    def __init__(self) -> None:
        self._trails: dict[int, tuple[Any, Trail]] = {}

    def mark(self, array: Any, trail: Trail) -> None:
        """Notes how an array was made; forgotten with the array, which is not kept."""
        key = id(array)
        self._trails[key] = (ref(array, lambda _: self._trails.pop(key, None)), trail)

    def get(self, array: Any) -> Trail | None:
        """What was noted of this very array."""
        entry = self._trails.get(id(array))
        return entry[1] if entry is not None and entry[0]() is array else None

    def newest(self) -> list[tuple[Any, Trail]]:
        """A few living arrays whose place in a source is known."""
        found: list[tuple[Any, Trail]] = []
        for reference, trail in reversed(list(self._trails.values())):
            array = reference()
            if array is not None and trail.matrix is not None and array.shape[0] * array.shape[1] <= RECENT_PIXELS:
                found.append((array, trail))
                if len(found) == LOOKED_AT:
                    break
        return found


traced = ArrayTrails()
"""Of this process."""


def wrap_arrays(module: Any) -> None:
    """Makes PIL images keep their trail when they become numpy arrays and images again."""
    to_array, from_array = module.Image.__array_interface__.fget, module.fromarray

    def __array_interface__(self: Any) -> Any:
        interface, trail = to_array(self), trail_of(self)
        if trail.matrix is not None and self.width * self.height <= RECENT_PIXELS:
            for entry in [entry for entry in recent if entry[0] == id(self)]:
                recent.remove(entry)
            recent.append((id(self), interface, trail))
        return interface

    @wraps(from_array)
    def fromarray(obj: Any, *given: Any, **keywords: Any) -> Any:
        result = from_array(obj, *given, **keywords)
        mark(result, trail_of_array(obj))
        return result

    module.Image.__array_interface__ = property(__array_interface__)
    module.fromarray = fromarray


def trail_of_array(array: Any) -> Trail:
    """Of an array that a function gave, or a part of one or of a recent image; else nothing is known of it."""
    root = array
    while hasattr(getattr(root, "base", None), "strides") and not isinstance(root.base, memoryview):
        trail = traced.get(root)
        if trail is not None:
            break
        root = root.base
    trail = traced.get(root)
    if trail is not None:
        return trail if root is array else part(trail, array, place_in(array, root))
    for whole, trail in recent_images():
        if getattr(root, "shape", ())[:2] == whole.shape[:2]:
            matrix = place_in(array, root)
            if matrix is not None and same_pixels(whole, matrix, array, root):
                return part(trail, array, matrix)
    return copied_from(array) or Trail(steps=(("fromarray", {}),))


def part(trail: Trail, array: Any, matrix: Matrix | None) -> Trail:
    """The trail of what an array shows of another one; without a matrix nobody can tell which part."""
    if matrix is None:
        return trail.after("fromarray", {}, None)
    corners = Trail("", (1 << 30, 1 << 30), matrix).box((array.shape[1], array.shape[0]))
    return trail.after("fromarray", {"box": [int(side) for side in corners or ()]}, matrix)


def place_in(array: Any, root: Any) -> Matrix | None:
    """How the pixels of a view lie in the array that it is a view of; None where they do not lie in a grid of it."""
    if root.ndim not in (2, 3) or array.ndim not in (2, 3) or not array.size or min(root.strides) <= 0:
        return None
    if array.ndim == 3 and (root.ndim == 2 or abs(array.strides[2]) != root.strides[2]):
        return None
    row, column = root.strides[:2]
    offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    upper, rest = divmod(offset, row)
    left = rest // column
    right, down = step_in(array.strides[1], row, column), step_in(array.strides[0], row, column)
    if right is None or down is None or right[0] * down[1] == right[1] * down[0]:
        return None
    # A step back from a pixel's left side is one from its right side.
    x, y = left + (right[0] + down[0] < 0), upper + (right[1] + down[1] < 0)
    return (right[0], down[0], x, right[1], down[1], y)


def step_in(stride: int, row: int, column: int) -> tuple[int, int] | None:
    """(columns, rows) of the root that one step of a view is."""
    if stride and stride % row == 0:
        return (0, stride // row)
    return (stride // column, 0) if stride and stride % column == 0 else None


def same_pixels(whole: Any, matrix: Matrix, array: Any, root: Any) -> bool:
    """Whether neither was altered since; of a plain rectangle the rest of the array does not matter."""
    if matrix[:2] != (1, 0) or matrix[3:5] != (0, 1) or array.ndim != whole.ndim:
        return bool(whole.tobytes() == root.tobytes())
    left, upper = int(matrix[2]), int(matrix[5])
    rectangle = whole[upper : upper + array.shape[0], left : left + array.shape[1]]
    return bool(rectangle.tobytes() == array.tobytes())


def copied_from(array: Any) -> Trail | None:
    """The trail of a copy: its pixels stand, row by row, in an array that was made lately."""
    if getattr(array, "ndim", 0) not in (2, 3) or array.shape[0] * array.shape[1] < LEAST_COPIED:
        return None
    for whole, trail in [*traced.newest(), *recent_images()]:
        corner = found_in(array, whole)
        if corner is not None:
            left, upper = corner
            return part(trail, array, (1, 0, left, 0, 1, upper))
    return None


def recent_images() -> list[tuple[Any, Trail]]:
    """The images that were made into arrays lately, the newest first, as they were then."""
    if not recent:
        return []
    from numpy import frombuffer  # whoever made an image into an array has loaded it

    return [
        (frombuffer(pixels["data"], pixels["typestr"]).reshape(pixels["shape"]), trail)
        for _, pixels, trail in reversed(list(recent))
    ]


def found_in(array: Any, whole: Any) -> tuple[int, int] | None:
    """(left, upper) of where an array stands in another one pixel by pixel; None when it does not."""
    if array.dtype != whole.dtype or array.shape[2:] != whole.shape[2:] or array.ndim != whole.ndim:
        return None
    height, width = array.shape[:2]
    if height > whole.shape[0] or width > whole.shape[1]:
        return None
    # The row with the widest range of values stands in the fewest places.
    rows = array.reshape(height, -1)
    chosen = int((rows.max(axis=1) ^ rows.min(axis=1)).argmax()) if array.dtype.kind in "bu" else height // 2
    needle, haystack = array[chosen].tobytes(), whole.tobytes()
    pixel = len(needle) // width
    at = haystack.find(needle)
    for _ in range(TRIES):
        if at < 0:
            return None
        y, left = divmod(at // pixel, whole.shape[1])
        upper = y - chosen
        fits = at % pixel == 0 and 0 <= upper <= whole.shape[0] - height and left + width <= whole.shape[1]
        if fits and whole[upper : upper + height, left : left + width].tobytes() == array.tobytes():
            return left, upper
        at = haystack.find(needle, at + 1)
    return None

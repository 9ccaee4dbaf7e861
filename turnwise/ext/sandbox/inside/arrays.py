"""The trail of an image through numpy: a part of its array is recognised when it becomes an image again."""

import builtins
from collections import deque
from functools import wraps
from typing import Any

from turnwise.data.images.provenance import Trail
from turnwise.ext.sandbox.inside.image_trails import mark, trail_of

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

recent: deque[Any] = deque(maxlen=2)
"""Images that were made into arrays lately: a part of such an array is recognised when it becomes an image again."""
RECENT_PIXELS = 4_000_000


def wrap_arrays(module: Any) -> None:
    """Makes PIL images keep their trail when they become numpy arrays and images again."""
    to_array, from_array = module.Image.__array_interface__.fget, module.fromarray

    def __array_interface__(self: Any) -> Any:
        traced = trail_of(self).matrix is not None and self.width * self.height <= RECENT_PIXELS
        if traced and not any(image is self for image in recent):
            recent.append(self)
        return to_array(self)

    @wraps(from_array)
    def fromarray(obj: Any, *given: Any, **keywords: Any) -> Any:
        result = from_array(obj, *given, **keywords)
        mark(result, trail_of_array(obj))
        return result

    module.Image.__array_interface__ = property(__array_interface__)
    module.fromarray = fromarray


def trail_of_array(array: Any) -> Trail:
    """Of an array that is a rectangle of a recent image, pixel by pixel; else nothing is known of it."""
    root = array
    while hasattr(getattr(root, "base", None), "strides") and not isinstance(root.base, memoryview):
        root = root.base
    for image in reversed(recent):
        box = part_of(array, root, image)
        if box is not None and same_pixels(image, box, array):
            return trail_of(image).after("fromarray", {"box": list(box)}, (1, 0, box[0], 0, 1, box[1]))
    return Trail(steps=(("fromarray", {}),))


def part_of(array: Any, root: Any, image: Any) -> tuple[int, int, int, int] | None:
    """Which rectangle of the image a view of its array would be."""
    strides = getattr(root, "strides", None)
    if strides is None or root.ndim < 2 or array.ndim != root.ndim or array.strides != strides or min(strides) <= 0:
        return None
    if (root.shape[1], root.shape[0]) != image.size or array.shape[2:] != root.shape[2:] or not array.size:
        return None
    offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    upper, rest = divmod(offset, strides[0])
    left, rest = divmod(rest, strides[1])
    if rest or left + array.shape[1] > image.width or upper + array.shape[0] > image.height:
        return None
    return (left, upper, left + array.shape[1], upper + array.shape[0])


def same_pixels(image: Any, box: tuple[int, int, int, int], array: Any) -> bool:
    """Whether neither was altered since."""
    part = image._new(image._crop(image.im, box))
    return bool(part.tobytes() == array.tobytes())

"""The `image_zoom` tool: a region of an image, cut out."""

import math
from typing import TYPE_CHECKING, Any

from turnwise.data.images.provenance import Trail
from turnwise.errors import ToolError
from turnwise.rollout.image_tools import ImageTool
from turnwise.rollout.sample_images import SourceImage
from turnwise.types import JsonSchema

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MIN_SIDE = 28
"""Pixels: what a vision model reads as one patch. A smaller box is grown around its centre."""
MOST_ASPECT = 100.0
Box = tuple[int, int, int, int]
BOX: JsonSchema = {
    "type": "array",
    "items": {"type": "number"},
    "minItems": 4,
    "maxItems": 4,
    "description": "The region as [x1, y1, x2, y2] in pixels of the image, from its upper left corner.",
}
LABEL: JsonSchema = {"type": "string", "description": "What is in the region."}


def zoom(source: SourceImage, arguments: dict[str, Any]) -> tuple[str, "Picture", Trail]:
    """Crops the region that `bbox_2d` names out of the image."""
    box = fit_box(arguments["bbox_2d"], source.picture)
    label = arguments.get("label")
    words = f"Zoomed in on {list(box)}" + (f", {label}" if label else "") + "."
    trail = source.trail.after("crop", {"box": list(box)}, (1, 0, box[0], 0, 1, box[1]))
    return words, source.picture.crop(box), trail


def fit_box(coordinates: list[float], picture: "Picture") -> Box:
    """Whole pixels inside the image; ToolError for what is no region of it."""
    if not all(isinstance(side, int | float) and abs(side) < math.inf for side in coordinates):
        raise ToolError("bbox_2d holds numbers")
    left, right = (min(max(side, 0.0), float(picture.width)) for side in (coordinates[0], coordinates[2]))
    top, bottom = (min(max(side, 0.0), float(picture.height)) for side in (coordinates[1], coordinates[3]))
    if left >= right or top >= bottom:
        size = f"{picture.width}x{picture.height}"
        raise ToolError(
            f"bbox_2d {coordinates} is no region of the image of {size} pixels: x1 < x2 and y1 < y2 inside it"
        )
    if max(right - left, bottom - top) > MOST_ASPECT * min(right - left, bottom - top):
        raise ToolError(f"bbox_2d {coordinates} is more than {MOST_ASPECT:g} times longer than wide")
    if min(picture.width, picture.height) < MIN_SIDE:
        raise ToolError(f"the image is smaller than {MIN_SIDE} pixels: there is nothing to zoom in on")
    x1, x2 = _grown(left, right, picture.width)
    y1, y2 = _grown(top, bottom, picture.height)
    return x1, y1, x2, y2


def _grown(start: float, end: float, limit: int) -> tuple[int, int]:
    """Whole pixels around one side of a box, at least MIN_SIDE of them, moved where they would leave the image."""
    first, last = math.floor(start), math.ceil(end)
    if last - first < MIN_SIDE:
        first = min(max(math.floor((start + end - MIN_SIDE) / 2), 0), limit - MIN_SIDE)
        last = first + MIN_SIDE
    return first, last


image_zoom = ImageTool(
    "image_zoom", "Zoom in on a region of the image.", {"bbox_2d": BOX, "label": LABEL}, ["bbox_2d"], zoom
)

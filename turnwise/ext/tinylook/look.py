"""The `look` tool: a region of the canvas in sixteenths, turned and stretched if asked, at the size of the view."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from turnwise.data.images.provenance import IDENTITY, turned
from turnwise.errors import EpisodeError, ToolError
from turnwise.ext.tinylook.look_grid import NOWHERE, SEEN, STEPS, TURNS, VIEW
from turnwise.rollout.sample_images import as_result, find_picture, stretched
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.types import JsonSchema, ToolResult

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Box = tuple[int, int, int, int]
LARGEST_VIEW = 1024
_WAYS = {90: 4, 180: 3, 270: 2}
"""Pillow's transpositions: it counts the other way."""


@dataclass(slots=True)
class Look:
    """One tool for all episodes. The row's `create_kwargs` name the image, and `view`, the side of what is shown."""

    name: str = "look"
    timeout: float = 60.0
    concurrency: int = 8
    reads_kwargs: tuple[str, ...] = ("image", "view")
    reads_images: ClassVar[bool] = True

    @property
    def schema(self) -> JsonSchema:
        box = {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": STEPS},
            "minItems": 4,
            "maxItems": 4,
            "description": f"The region as [x1, y1, x2, y2], in {STEPS}ths of the image from its upper left corner.",
        }
        parameters = {
            "type": "object",
            "properties": {
                "box": box,
                "turn": {"type": "integer", "enum": list(TURNS), "description": "Degrees to turn it clockwise."},
                "contrast": {"type": "boolean", "description": "Stretch its grey levels."},
            },
            "required": ["box"],
        }
        about = "Look at a region of the image from near."
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    async def open(self, context: ToolContext) -> ToolSession:
        return _LookSession(context, self.name)


@dataclass(slots=True)
class _LookSession:
    context: ToolContext
    name: str

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return await asyncio.to_thread(self._look, arguments)

    def _look(self, arguments: dict[str, Any]) -> ToolResult:
        source = find_picture(self.context, 0)
        view = self.context.kwargs.get("create_kwargs", {}).get("view", VIEW)
        if not isinstance(view, int) or not 8 <= view <= LARGEST_VIEW:
            raise EpisodeError(f"create_kwargs.view is a number of pixels from 8 to {LARGEST_VIEW}, not {view!r:.40}")
        box, turn = box_of(arguments["box"], source.picture.size), arguments.get("turn")
        contrast = bool(arguments.get("contrast"))
        picture = crop_view(source.picture, box, turn, contrast, view)
        trail = source.trail.after("crop", {"box": list(box)}, (1, 0, box[0], 0, 1, box[1]))
        size = box[2] - box[0], box[3] - box[1]
        if turn is not None:
            trail = trail.after("rotate", {"angle": -turn}, turned(_WAYS[turn], size))
            size = size if turn == 180 else (size[1], size[0])
        trail = trail.after("autocontrast", {}, IDENTITY) if contrast else trail
        trail = trail.after("resize", {"size": [view, view]}, stretched(size, picture.size))
        return as_result(SEEN, self.name, picture, trail)

    async def close(self) -> None:
        return None


def box_of(sixteenths: Sequence[int], size: tuple[int, int]) -> Box:
    """The region in pixels; ToolError for one that holds nothing."""
    left, upper, right, lower = sixteenths
    if left >= right or upper >= lower:
        raise ToolError(NOWHERE)
    width, height = size
    box = left * width // STEPS, upper * height // STEPS, right * width // STEPS, lower * height // STEPS
    if box[0] >= box[2] or box[1] >= box[3]:
        raise ToolError(f"the image has {width}x{height} pixels: there is none in this box")
    return box


def crop_view(picture: "Picture", box: Box, turn: int | None, contrast: bool, view: int) -> "Picture":
    """The region, turned clockwise, stretched in its grey levels, and then brought to the size of the view."""
    from PIL import ImageOps
    from PIL.Image import Resampling, Transpose

    region = picture.crop(box)
    if turn is not None:
        region = region.transpose(Transpose(_WAYS[turn]))
    if contrast:
        region = ImageOps.autocontrast(region)
    return region.resize((view, view), Resampling.BOX)


look = Look()

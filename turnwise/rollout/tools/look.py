"""The `look` tool: a region of the canvas in sixteenths, turned and stretched if asked, at the size of the view."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.errors import ToolError
from turnwise.rollout.sample_images import as_result, read_picture
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.sandbox.inside.trail import IDENTITY, Trail, scaled, turned
from turnwise.types import JsonSchema, ToolResult

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Box = tuple[int, int, int, int]
STEPS, VIEW = 16, 64
TURNS = (90, 180, 270)
_WAYS = {90: 4, 180: 3, 270: 2}
"""Pillow's names for turning clockwise: it counts the other way."""
SEEN = "seen"
NOWHERE = f"this box is no region of the image: x1 < x2 and y1 < y2, from 0 to {STEPS}"
SOURCE = "canvas_0.png"
"""What the sandbox calls the same image."""


@dataclass(slots=True)
class Look:
    """One tool for all episodes. The row's `create_kwargs` name the image, and `view`, the side of what is shown."""

    name: str = "look"
    timeout: float = 60.0
    concurrency: int = 8

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
        return _LookSession(context)


@dataclass(slots=True)
class _LookSession:
    context: ToolContext

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return await asyncio.to_thread(self._look, arguments)

    def _look(self, arguments: dict[str, Any]) -> ToolResult:
        picture = read_picture(self.context, 0)
        view = self.context.kwargs.get("create_kwargs", {}).get("view", VIEW)
        box, turn, contrast = box_of(arguments["box"], picture.size), arguments.get("turn"), arguments.get("contrast")
        trail = Trail(SOURCE, picture.size, IDENTITY)
        trail = trail.after("crop", {"box": list(box)}, (1, 0, box[0], 0, 1, box[1]))
        size = box[2] - box[0], box[3] - box[1]
        if turn is not None:
            method = _WAYS[turn]
            trail = trail.after("rotate", {"angle": -turn}, turned(method, size))  # Pillow counts the other way
            size = size if turn == 180 else (size[1], size[0])
        trail = trail.after("autocontrast", {}, IDENTITY) if contrast else trail
        trail = trail.after("resize", {"size": [view, view]}, scaled((0, 0, *size), (view, view)))
        shown = as_result(SEEN, looked_at(picture, box, turn, bool(contrast), view), {})
        facts = {"name": "look", "data": shown.images[0].source, "size": [view, view], "source": SOURCE}
        facts |= {"source_size": list(picture.size), "box": list(box), "matrix": trail.matrix, "provenance": "verified"}
        facts["steps"] = [{"name": name, "arguments": given} for name, given in trail.steps]
        return ToolResult(SEEN, shown.images, info={"images": [facts]})

    async def close(self) -> None:
        return None


def box_of(sixteenths: Sequence[int], size: tuple[int, int]) -> Box:
    """The region in pixels; ToolError for one that holds nothing."""
    left, upper, right, lower = sixteenths
    if left >= right or upper >= lower:
        raise ToolError(NOWHERE)
    width, height = size
    return left * width // STEPS, upper * height // STEPS, right * width // STEPS, lower * height // STEPS


def looked_at(picture: "Picture", box: Box, turn: int | None, contrast: bool, view: int) -> "Picture":
    """The region, turned clockwise, stretched in its grey levels, and then brought to the size of the view."""
    from PIL import Image, ImageOps

    found = picture.crop(box)
    if turn is not None:
        found = found.transpose(Image.Transpose(_WAYS[turn]))
    if contrast:
        found = ImageOps.autocontrast(found)
    return found.resize((view, view), Image.Resampling.BOX)


look = Look()

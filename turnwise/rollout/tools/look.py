"""The `look` tool: a region of the canvas in sixteenths, turned and stretched if asked, at the size of the view."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.errors import ToolError
from turnwise.rollout.sample_images import find_picture, png_url
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.types import Image, JsonSchema, ToolResult

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Box = tuple[int, int, int, int]
STEPS, VIEW = 16, 64
TURNS = (90, 180, 270)
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
        picture = find_picture(self.context, 0).picture
        view = self.context.kwargs.get("create_kwargs", {}).get("view", VIEW)
        box = box_of(arguments["box"], picture.size)
        turn, contrast = arguments.get("turn"), bool(arguments.get("contrast"))
        steps: list[dict[str, Any]] = [{"name": "crop", "arguments": {"box": list(box)}}]
        steps += [] if turn is None else [{"name": "rotate", "arguments": {"angle": -turn}}]  # as Pillow counts
        steps += [{"name": "autocontrast", "arguments": {}}] if contrast else []
        shown = Image(png_url(looked_at(picture, box, turn, contrast, view)))
        facts = {"name": "look", "data": shown.source, "size": [view, view], "source": SOURCE}
        facts |= {"source_size": list(picture.size), "box": list(box), "steps": steps, "provenance": "verified"}
        return ToolResult(SEEN, (shown,), info={"images": [facts]})

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
    from PIL import ImageOps
    from PIL.Image import Resampling, Transpose

    found = picture.crop(box)
    if turn is not None:
        ways = {90: Transpose.ROTATE_270, 180: Transpose.ROTATE_180, 270: Transpose.ROTATE_90}
        found = found.transpose(ways[turn])
    if contrast:
        found = ImageOps.autocontrast(found)
    return found.resize((view, view), Resampling.BOX)


look = Look()

"""The `look` tool: a region of the canvas in sixteenths, turned and stretched if asked, at the size of the view."""

import asyncio
from dataclasses import dataclass
from typing import Any

from turnwise.errors import ToolError
from turnwise.rollout.sample_images import as_result, read_picture
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.types import JsonSchema, ToolResult

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
        from PIL import Image, ImageOps

        picture = read_picture(self.context, 0)
        left, upper, right, lower = arguments["box"]
        if left >= right or upper >= lower:
            raise ToolError(NOWHERE)
        size = picture.size
        box = tuple(side * size[number % 2] // STEPS for number, side in enumerate((left, upper, right, lower)))
        steps: list[dict[str, Any]] = [{"name": "crop", "arguments": {"box": list(box)}}]
        picture = picture.crop(box)  # type: ignore[arg-type]
        turn = arguments.get("turn")
        if turn is not None:
            ways = {90: Image.Transpose.ROTATE_270, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_90}
            picture = picture.transpose(ways[turn])  # Pillow counts the other way
            steps.append({"name": "rotate", "arguments": {"angle": -turn}})
        if arguments.get("contrast"):
            picture = ImageOps.autocontrast(picture)
            steps.append({"name": "autocontrast", "arguments": {}})
        view = self.context.kwargs.get("create_kwargs", {}).get("view", VIEW)
        picture = picture.resize((view, view), Image.Resampling.BOX)
        shown = as_result(SEEN, picture, {})
        facts = {"name": "look", "data": shown.images[0].source, "size": [view, view], "source": SOURCE}
        facts |= {"source_size": list(size), "box": list(box), "steps": steps, "provenance": "verified"}
        return ToolResult(SEEN, shown.images, info={"images": [facts]})

    async def close(self) -> None:
        return None


look = Look()

"""The `image_rotate` tool: the sample's image, turned."""

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from turnwise.errors import ToolError
from turnwise.rollout.sample_images import as_result, read_picture
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.types import JsonSchema, ToolResult


@dataclass(slots=True)
class ImageRotate:
    """One tool for all episodes; each call reads the sample's image anew."""

    name: str = "image_rotate"
    timeout: float = 60.0
    concurrency: int = 8

    @property
    def schema(self) -> JsonSchema:
        parameters = {
            "type": "object",
            "properties": {
                "angle": {"type": "number", "description": "Degrees clockwise."},
                "image": {"type": "integer", "minimum": 0, "description": "Which image, from 0."},
            },
            "required": ["angle"],
        }
        about = "Turn the image clockwise."
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    async def open(self, context: ToolContext) -> ToolSession:
        return _RotateSession(context)


@dataclass(slots=True)
class _RotateSession:
    context: ToolContext

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return await asyncio.to_thread(self._rotate, arguments)

    def _rotate(self, arguments: dict[str, Any]) -> ToolResult:
        from PIL.Image import Resampling

        angle, number = arguments["angle"], arguments.get("image", 0)
        if not math.isfinite(angle):
            raise ToolError("angle is a number of degrees")
        picture = read_picture(self.context, number)
        turned = picture.rotate(-(angle % 360), resample=Resampling.BICUBIC, expand=True)  # PIL turns the other way
        return as_result(f"Turned by {angle:g} degrees clockwise.", turned, {"source": number, "angle": angle})

    async def close(self) -> None:
        return None


image_rotate = ImageRotate()

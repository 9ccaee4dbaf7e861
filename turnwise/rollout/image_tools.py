"""Tools of one picture in and one picture out, made by the host: its pixels, and so its past, are not in doubt."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from turnwise.data.images.provenance import Trail
from turnwise.rollout.sample_images import SourceImage, as_result, find_picture
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.types import JsonSchema, ToolResult

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Operation = Callable[[SourceImage, dict[str, Any]], tuple[str, "Picture", Trail]]
"""(the image, the arguments) -> (what the model reads, the picture, its past)."""
WHICH: JsonSchema = {
    "type": ["integer", "string"],
    "minimum": 0,
    "description": "Which image: its number, from 0 in the order they were shown, or its name.",
}


@dataclass(slots=True)
class ImageTool:
    """One tool for all episodes; each call reads its image anew, so that nothing is held between them."""

    name: str
    about: str
    properties: dict[str, JsonSchema]
    required: list[str]
    operation: Operation
    timeout: float = 60.0
    concurrency: int = 8
    reads_kwargs: tuple[str, ...] = ("image",)
    reads_images: ClassVar[bool] = True

    @property
    def schema(self) -> JsonSchema:
        parameters = {
            "type": "object", "properties": {**self.properties, "image": WHICH}, "required": self.required,
        }  # fmt: skip
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": parameters},
        }

    async def open(self, context: ToolContext) -> ToolSession:
        return _ImageSession(self, context)


@dataclass(slots=True)
class _ImageSession:
    tool: ImageTool
    context: ToolContext
    calls: int = 0

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        self.calls += 1
        return await asyncio.to_thread(self._work, arguments, f"{self.tool.name}_{self.calls}")

    def _work(self, arguments: dict[str, Any], name: str) -> ToolResult:
        source = find_picture(self.context, arguments.get("image", 0))
        words, picture, trail = self.tool.operation(source, arguments)
        return as_result(words, name, picture, trail)

    async def close(self) -> None:
        return None

"""Images in a tool's result: looked at before anybody is shown them, and kept on the call's record."""

import asyncio
import dataclasses

from turnwise.errors import DataError, ToolError
from turnwise.rollout.openai_messages import data_url
from turnwise.types import Image, ToolResult

MOST_IMAGES = 16
"""In one result: each is kept with the run, and sent again with every turn that follows."""


async def with_images(result: ToolResult) -> ToolResult:
    """The result with its images as data URLs, which last longer than a tool's files, and with facts of each in `info`.

    The recorder moves them into files of the run. A tool that gives such facts itself has given them.
    """
    if len(result.images) > MOST_IMAGES:
        raise ToolError(f"the tool returned {len(result.images)} images; at most {MOST_IMAGES} are taken")
    if not all(isinstance(image, Image) for image in result.images):
        raise ToolError("the tool's images must be turnwise.types.Image, a file or a data URL each")
    try:
        read = await asyncio.to_thread(lambda: tuple(Image(data_url(image)) for image in result.images))
    except DataError as error:
        raise ToolError(str(error)) from error
    facts = [{"name": f"image_{number}", "data": image.source} for number, image in enumerate(read, 1)]
    return dataclasses.replace(result, images=read, info={"images": facts, **result.info})

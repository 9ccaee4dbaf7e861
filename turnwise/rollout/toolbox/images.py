"""Images in a tool's result: looked at before anybody is shown them, and kept on the call's record."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from turnwise.data.images.provenance import composed
from turnwise.errors import DataError, EpisodeError, ToolError
from turnwise.rollout.openai_messages import data_url
from turnwise.rollout.sample_images import MadeImage, opened, png_url, stretched, trail_in
from turnwise.types import Image, Sample, ToolResult

MOST_IMAGES = 16
"""In one result: each is kept with the run, and sent again with every turn that follows."""

Size = tuple[int, int]
PrepareImages = Callable[[Sequence[Image]], Awaitable[None]]
"""Has the model's processor prepare images that it is about to be shown; DataError for one that it cannot take."""
ShowImages = Callable[[Sample, int, tuple[Image, ...]], Awaitable[tuple[Image, ...]]]
"""(the episode's sample, how many images it had before, what a tool gave) -> what the model is shown instead."""


async def with_images(result: ToolResult, size: Size | None = None) -> tuple[ToolResult, list[MadeImage]]:
    """The result with its images as data URLs, which last longer than a tool's files, and with facts of each in `info`;
    and the images themselves, for the tools that work on them later.

    With a size, what the model is shown has that many pixels. The recorder moves images into files of the run. A tool
    that gives such facts itself has given them.
    """
    if len(result.images) > MOST_IMAGES:
        raise ToolError(f"the tool returned {len(result.images)} images; at most {MOST_IMAGES} are taken")
    if not all(isinstance(image, Image) for image in result.images):
        raise ToolError("the tool's images must be turnwise.types.Image, a file or a data URL each")
    try:
        return await asyncio.to_thread(_with_images, result, size)
    except (DataError, EpisodeError) as error:
        raise ToolError(str(error)) from error


def _with_images(result: ToolResult, size: Size | None) -> tuple[ToolResult, list[MadeImage]]:
    read = [Image(data_url(image)) for image in result.images]
    noted = result.info.get("images")
    facts: list[dict[str, Any]] = [
        {"name": f"image_{number}", "data": image.source} for number, image in enumerate(read, 1)
    ]
    own = isinstance(noted, list) and len(noted) == len(read) and all(isinstance(entry, dict) for entry in noted)
    if own and isinstance(noted, list):
        facts = list(noted)
    made_images = [
        MadeImage(str(fact.get("name") or f"image_{number}"), image, trail_in(fact))
        for number, (image, fact) in enumerate(zip(read, facts, strict=True), 1)
    ]
    if size is not None:
        fitted = [_fitted(image, fact, size) for image, fact in zip(read, facts, strict=True)]
        read, facts = [image for image, _ in fitted], [fact for _, fact in fitted]
    if noted is not None and not own:  # the tool's own words, about something else
        facts = noted
    return dataclasses.replace(result, images=tuple(read), info={**result.info, "images": facts}), made_images


def _fitted(image: Image, fact: dict[str, Any], size: Size) -> tuple[Image, dict[str, Any]]:
    from PIL.Image import Resampling

    picture = opened(image, "an image of the tool's")
    if picture.size == size:
        return image, {**fact, "size": list(size)}
    resized = Image(png_url(picture.resize(size, Resampling.BICUBIC)))
    fact = {**fact, "data": resized.source, "size": list(size)}
    if isinstance(fact.get("matrix"), list):
        matrix = composed(tuple(fact["matrix"]), stretched(picture.size, size))
        fact["matrix"] = None if matrix is None else list(matrix)
    return resized, fact

"""Images for the tools that look at them: those of the sample, then those that tools gave back; bounded in size."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.data.images.provenance import IDENTITY, Matrix, OriginCheck, Trail
from turnwise.errors import DataError, EpisodeError, ToolError
from turnwise.errors.nearest_name import nearest
from turnwise.rollout.tools.tool import ToolContext
from turnwise.system.image_bytes import data_url
from turnwise.system.image_sources import read_image
from turnwise.types import Image, ToolResult

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

LONGEST_SIDE = 1280
"""Pixels of an image that goes back to the model; a longer one is made smaller."""


@dataclass(frozen=True, slots=True)
class MadeImage:
    """An image that a tool gave back in this episode, as it was before the run's `size` for it."""

    name: str
    image: Image
    trail: Trail
    """Where it came from, as far as the host has seen for itself."""


@dataclass(frozen=True, slots=True)
class SourceImage:
    """An image to work on, and where it came from."""

    name: str
    picture: "Picture"
    trail: Trail


def given_images(context: ToolContext) -> dict[str, Image]:
    """What the row gives this tool, by name; EpisodeError for what is no image."""
    from turnwise.storage.images.copies import images_for

    try:
        return images_for(context.sample, context.kwargs)
    except DataError as error:
        raise EpisodeError(f"sample {context.sample.id}: tools_kwargs: {error}") from error


def find_picture(context: ToolContext, which: float | str) -> SourceImage:
    """An image by number (the row's from 0, then those that tools gave back, in the order they were shown) or by name.

    ToolError for one that there is not; EpisodeError for a row's that cannot be used, which is the row's fault.
    """
    row_images = given_images(context)
    names = [*row_images, *(tool_image.name for tool_image in context.made)]
    if not names:
        raise ToolError("there is no image in this conversation")
    if isinstance(which, str) and which not in names:
        raise ToolError(f"there is no image {which[:80]!r}: {nearest(which, names)}")
    number = names.index(which) if isinstance(which, str) else int(which)  # 1.0 is a whole number in JSON
    if number >= len(names):
        raise ToolError(f"there is no image {number}: they are numbered from 0 to {len(names) - 1}")
    if number >= len(row_images):
        tool_image = context.made[number - len(row_images)]
        return SourceImage(tool_image.name, opened(tool_image.image, f"image {number}"), tool_image.trail)
    name = names[number]
    picture = opened(row_images[name], f"image {number} of the sample")
    return SourceImage(name, picture, Trail(name, picture.size, IDENTITY))


def opened(image: Image, what: str) -> "Picture":
    """Decoded as a model is shown it: upright, in RGB. EpisodeError for what cannot be."""
    from turnwise.chat.images.pixels import unpack

    try:
        return unpack(read_image(image.source), None).picture
    except DataError as error:
        raise EpisodeError(f"{what} cannot be read: {error}") from error


def png_url(picture: "Picture") -> str:
    """The picture as PNG in a data URL."""
    held = io.BytesIO()
    picture.save(held, "png")
    url = data_url(held.getvalue())
    assert url is not None
    return url


def as_result(words: str, name: str, picture: "Picture", trail: Trail) -> ToolResult:
    """A picture that the host made, for the model, with what rules and judges read of it."""
    if max(picture.size) > LONGEST_SIDE:
        before = picture.size
        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        trail = trail.after("resize", {"size": list(picture.size)}, stretched(before, picture.size))
    url = png_url(picture)
    return ToolResult(words, (Image(url),), info={"images": [image_facts(name, url, picture.size, trail)]})


def stretched(before: Sequence[int], after: Sequence[int]) -> Matrix:
    """How the pixels of a resized image lie in the image before."""
    return (before[0] / after[0], 0, 0, 0, before[1] / after[1], 0)


def image_facts(name: str, url: str, size: tuple[int, int], trail: Trail) -> dict[str, Any]:
    """Of an image whose past the host has seen for itself."""
    return {
        "name": name,
        "data": url,
        "size": list(size),
        "source": trail.source,
        "source_size": None if trail.source_size is None else list(trail.source_size),
        "box": trail.box(size),
        "steps": [{"name": step, "arguments": arguments} for step, arguments in trail.steps],
        "matrix": None if trail.matrix is None else list(trail.matrix),
        "provenance": (OriginCheck.UNVERIFIED if trail.source is None else OriginCheck.VERIFIED).value,
    }


def trail_in(facts: dict[str, Any]) -> Trail:
    """The past of an image by its facts; of one that is not verified nothing is known."""
    matrix, size, steps = facts.get("matrix"), facts.get("source_size"), facts.get("steps") or ()
    if facts.get("provenance") != OriginCheck.VERIFIED.value or not isinstance(size, list):
        return Trail()
    past = tuple((step["name"], step["arguments"]) for step in steps)
    return Trail(facts["source"], (size[0], size[1]), None if matrix is None else tuple(matrix), past)

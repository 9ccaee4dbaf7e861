"""The `image_rotate` tool: an image, turned."""

from typing import TYPE_CHECKING, Any

from turnwise.data.images.provenance import IDENTITY, Trail, turned
from turnwise.errors import ToolError
from turnwise.rollout.image_tools import ImageTool
from turnwise.rollout.sample_images import SourceImage

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_QUARTERS = {90: 4, 180: 3, 270: 2}
"""PIL's transposition for each turn clockwise."""


MOST_DEGREES = 1e9
"""Beyond them a number says nothing of a turn."""


def rotate(source: SourceImage, arguments: dict[str, Any]) -> tuple[str, "Picture", Trail]:
    """Turned by `angle` degrees clockwise."""
    from PIL.Image import Resampling

    angle = arguments["angle"]
    if not abs(angle) < MOST_DEGREES:
        raise ToolError("angle is a number of degrees")
    quarter = angle % 360
    picture = source.picture.rotate(-quarter, resample=Resampling.BICUBIC, expand=True)  # PIL turns the other way
    change = IDENTITY if quarter == 0 else None
    if quarter in _QUARTERS:
        change = turned(_QUARTERS[quarter], source.picture.size)
    trail = source.trail.after("rotate", {"angle": -quarter, "expand": True}, change)
    return f"Turned by {angle:g} degrees clockwise.", picture, trail


image_rotate = ImageTool(
    "image_rotate",
    "Turn the image clockwise.",
    {"angle": {"type": "number", "description": "Degrees clockwise."}},
    ["angle"],
    rotate,
)

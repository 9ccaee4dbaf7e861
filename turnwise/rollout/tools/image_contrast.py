"""The `image_contrast` tool: an image with its shades stretched, so that what is faint can be seen."""

import math
from typing import TYPE_CHECKING, Any

from turnwise.data.images.provenance import IDENTITY, Trail
from turnwise.errors import ToolError
from turnwise.rollout.image_tools import ImageTool
from turnwise.rollout.sample_images import SourceImage

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


def contrast(source: SourceImage, arguments: dict[str, Any]) -> tuple[str, "Picture", Trail]:
    """The darkest shades become black and the lightest white, but for `cutoff` percent of the pixels at each end."""
    from PIL import ImageOps

    cutoff = float(arguments.get("cutoff", 0.0))
    if not math.isfinite(cutoff):
        raise ToolError("cutoff is a number of percent")
    picture = ImageOps.autocontrast(source.picture, cutoff=cutoff)
    return "Stretched the contrast.", picture, source.trail.after("autocontrast", {"cutoff": cutoff}, IDENTITY)


image_contrast = ImageTool(
    "image_contrast",
    "Stretch the contrast of the image, so that faint marks stand out.",
    {
        "cutoff": {
            "type": "number",
            "minimum": 0,
            "maximum": 49,
            "description": "Percent of the darkest and of the lightest pixels to leave out of account (default 0).",
        }
    },
    [],
    contrast,
)

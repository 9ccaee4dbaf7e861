"""The `image_crop` tool: `image_zoom` by its other name."""

from turnwise.rollout.image_tools import ImageTool
from turnwise.rollout.tools.image_zoom import BOX, LABEL, zoom

image_crop = ImageTool(
    "image_crop", "Cut a region out of the image.", {"bbox_2d": BOX, "label": LABEL}, ["bbox_2d"], zoom
)

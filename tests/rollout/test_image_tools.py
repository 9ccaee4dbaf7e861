"""`image_zoom` and `image_rotate`: regions in whole pixels, turned the right way, and bombs that stay closed."""

import asyncio
import base64
import io
import os
import struct
import zlib
from typing import Any

import PIL.Image
import pytest

from turnwise.errors import EpisodeError, ToolError
from turnwise.rollout.sample_images import LONGEST_SIDE
from turnwise.rollout.toolbox.loading import load_tool
from turnwise.rollout.tools.tool import ToolContext
from turnwise.types import Image, Message, Role, Sample, ToolResult


def png(width: int, height: int, corner: str = "red") -> bytes:
    """White, with one coloured quarter: the upper left."""
    picture = PIL.Image.new("RGB", (width, height), "white")
    picture.paste(corner, (0, 0, width // 2, height // 2))
    held = io.BytesIO()
    picture.save(held, "png")
    return held.getvalue()


def url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def use(name: str, images: list[str], kwargs: dict[str, Any] | None = None, **arguments: Any) -> ToolResult:
    sample = Sample("t:0", (Message(Role.USER, "?"),), "x", images=tuple(map(Image, images)))

    async def main() -> ToolResult:
        session = await load_tool(name).open(ToolContext(sample, kwargs or {}))
        try:
            return await session.call(arguments)
        finally:
            await session.close()

    return asyncio.run(main())


def seen(result: ToolResult) -> PIL.Image.Image:
    (image,) = result.images
    return PIL.Image.open(io.BytesIO(base64.b64decode(image.source.partition(",")[2])))


def test_a_region_is_cut_out_of_the_samples_image(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(200, 100))
    result = use("image_zoom", [str(path)], bbox_2d=[0, 0, 100, 50], label="the red one")
    assert (seen(result).size, seen(result).getextrema()) == ((100, 50), ((255, 255), (0, 0), (0, 0)))
    (facts,) = result.info["images"]
    assert (facts["source"], facts["box"], facts["size"]) == ("a.png", [0, 0, 100, 50], [100, 50])
    assert (facts["provenance"], facts["source_size"]) == ("verified", [200, 100])
    assert "the red one" in result.text


@pytest.mark.parametrize(
    ("box", "fitted"),
    [
        ([10.4, 10.6, 60.2, 50.1], [10, 10, 61, 51]),
        ([-50, -50, 1000, 1000], [0, 0, 200, 100]),
        ([100, 50, 102, 52], [87, 37, 115, 65]),
        ([0, 0, 3, 3], [0, 0, 28, 28]),
        ([-(10**400), 0, 10**400, 1e308], [0, 0, 200, 100]),
        ([197, 97, 200, 100], [172, 72, 200, 100]),
    ],
)
def test_boxes_are_clamped_and_small_ones_grow(box, fitted):
    assert use("image_zoom", [url(png(200, 100))], bbox_2d=box).info["images"][0]["box"] == fitted


@pytest.mark.parametrize(
    "box",
    [[5, 5, 5, 50], [50, 5, 5, 50], [300, 0, 400, 50], [0, 0, 200, 1], [float("nan"), 0, 9, 9], [10**400, 0, 9, 9]],
)
def test_a_box_that_is_no_region_is_an_error_the_model_reads(box):
    with pytest.raises(ToolError):
        use("image_zoom", [url(png(200, 100))], bbox_2d=box)


def test_turning_is_clockwise_and_large_results_are_made_smaller():
    turned = seen(use("image_rotate", [url(png(200, 100))], angle=90))
    assert turned.size == (100, 200)
    assert turned.getpixel((90, 10)) == (255, 0, 0), "upper left goes to the upper right"
    large = use("image_rotate", [url(png(3000, 400))], angle=0)
    assert max(seen(large).size) == LONGEST_SIDE


@pytest.mark.parametrize("angle", [10**400, 1e308, float("inf"), float("nan")])
def test_a_turn_that_is_none_is_an_error_the_model_reads(angle):
    with pytest.raises(ToolError, match="number of degrees"):
        use("image_rotate", [url(png(200, 100))], angle=angle)


def test_a_look_at_no_pixel_is_an_error_the_model_reads():
    assert use("look", [url(png(8, 8))], box=[0, 0, 2, 2]).info["images"][0]["box"] == [0, 0, 1, 1]
    with pytest.raises(ToolError, match="8x8 pixels: there is none in this box"):
        use("look", [url(png(8, 8))], box=[0, 0, 1, 1])


def test_the_image_that_create_kwargs_name_stands_before_the_samples():
    own = {"create_kwargs": {"image": url(png(64, 64, "blue"))}}
    result = use("image_zoom", [url(png(64, 64))], own, bbox_2d=[0, 0, 30, 30])
    assert seen(result).getpixel((5, 5)) == (0, 0, 255)
    with pytest.raises(ToolError, match="no image 1"):
        use("image_zoom", [url(png(64, 64))], bbox_2d=[0, 0, 30, 30], image=1)
    with pytest.raises(ToolError, match="no image in"):
        use("image_zoom", [], bbox_2d=[0, 0, 30, 30])


def test_bombs_pipes_addresses_and_what_is_no_image_are_refused(tmp_path):
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    (tmp_path / "text.png").write_text("hello")
    for source in (
        url(b"\x89PNG\r\n\x1a\n" + chunk),
        str(pipe),
        "http://127.0.0.1:9/a.png",
        str(tmp_path / "text.png"),
        str(tmp_path / "none.png"),
        "data:image/png;base64,!!!",
    ):
        with pytest.raises(EpisodeError, match="image 0 of the sample"):
            use("image_rotate", [source], angle=10)

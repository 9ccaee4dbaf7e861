"""Where images came from: the box is checked against the pixels themselves."""

import io
import math
from pathlib import Path

import numpy
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data.images.provenance import IDENTITY, MAX_STEPS, Trail, scaled, turned
from turnwise.ext.sandbox.inside.image_trails import short, shortened

SIZE = (40, 30)


def source():
    """Red tells the column, green the row."""
    x, y = numpy.meshgrid(numpy.arange(SIZE[0]), numpy.arange(SIZE[1]))
    return PIL.Image.fromarray(numpy.stack([x, y, x * 0], axis=2).astype(numpy.uint8))


def content():
    buffer = io.BytesIO()
    source().save(buffer, "PNG")
    return ("cat.png", buffer.getvalue(), None, None)


def provenance(host, code, *given):
    reply = host.run(code, *given)
    assert reply["status"] == "ok", reply
    return reply["images"][-1]["provenance"]


@pytest.mark.parametrize(
    "first",
    [
        "img0",
        "images['cat.png']",
        "Image.open('cat.png')",
        "Image.open(image_path)",
        "Image.open(open('cat.png', 'rb'))",
        "Image.open(pathlib.Path('cat.png'))",
        "Image.open(io.BytesIO(open('cat.png', 'rb').read()))",
    ],
)
def test_every_way_to_the_source_is_known(host, first):
    code = f"import io, pathlib\nfrom PIL import Image\n{first}"
    whole = [0, 0, 40, 30]
    assert provenance(host, code, content()) == {"source": "cat.png", "box": whole, "frame": whole, "steps": []}


@pytest.mark.parametrize(
    ("code", "box"),
    [
        ("img0.crop((10, 5, 30, 25))", [10, 5, 30, 25]),
        ("img0.crop((10, 5, 30, 25)).crop((1, 2, 5, 6))", [11, 7, 15, 11]),
        ("img0.crop((10, 5, 30, 25)).resize((200, 200))", [10, 5, 30, 25]),
        ("img0.crop((10, 5, 30, 25)).resize((200, 200)).crop((50, 50, 100, 150))", [15, 10, 20, 20]),
        ("img0.resize((80, 60), Image.LANCZOS, box=(10, 10, 20, 20))", [10, 10, 20, 20]),
        ("img0.crop((30, 20, 60, 50))", [30, 20, 40, 30]),
        ("img0.crop((-10, -10, 5, 5))", [0, 0, 5, 5]),
        ("img0.crop((-10, -10, 5, 5)).crop((5, 5, 15, 15))", [0, 0, 5, 5]),
        ("img0.crop((100, 100, 120, 120))", None),
        ("img0.crop((10.4, 5.4, 30.4, 25.4))", [10, 5, 30, 25]),
        ("img0.crop((np.int64(3), 4, np.float64(9), 8))", [3, 4, 9, 8]),
        ("img0.rotate(90, expand=True).crop((0, 0, 10, 5))", [35, 0, 40, 10]),
        ("img0.rotate(180).crop((0, 0, 10, 5))", [30, 25, 40, 30]),
        ("img0.rotate(45)", None),
        ("img0.rotate(90)", None),
        ("img0.rotate(0)", [0, 0, 40, 30]),
        ("img0.rotate(180, center=(1, 1))", None),
        ("img0.transpose(Image.FLIP_LEFT_RIGHT).crop((0, 0, 10, 5))", [30, 0, 40, 5]),
        ("img0.transform((10, 10), Image.AFFINE, (1, 0, 0, 0, 1, 0))", None),
        ("img0.rotate(45).crop((0, 0, 5, 5))", None),
        ("img0.convert('L').filter(ImageFilter.BLUR).point(lambda v: v).crop((1, 1, 3, 3))", [1, 1, 3, 3]),
        ("img0.reduce(2)", [0, 0, 40, 30]),
        ("img0.reduce(2, box=(10, 10, 20, 20)).crop((1, 1, 2, 2))", [12, 12, 14, 14]),
        ("ImageOps.crop(img0, 5)", [5, 5, 35, 25]),
        ("ImageOps.fit(img0, (30, 30))", [5, 0, 35, 30]),
        ("ImageOps.mirror(img0.crop((0, 0, 10, 10)))", [0, 0, 10, 10]),
        ("ImageOps.grayscale(ImageOps.invert(img0))", [0, 0, 40, 30]),
        ("ImageOps.contain(img0, (20, 20))", [0, 0, 40, 30]),
        ("ImageOps.expand(img0, 5)", None),
        ("ImageEnhance.Brightness(img0.crop((1, 2, 3, 4))).enhance(2)", [1, 2, 3, 4]),
        ("ImageEnhance.Contrast(img0).enhance(0.5)", [0, 0, 40, 30]),
        ("img0.split()[0].crop((1, 1, 4, 4))", [1, 1, 4, 4]),
        ("Image.merge('RGB', img0.crop((1, 1, 4, 4)).split())", [1, 1, 4, 4]),
        ("Image.blend(Image.new('RGB', img0.size), img0, 0.5)", [0, 0, 40, 30]),
        ("pickle.loads(pickle.dumps(img0.crop((1, 1, 4, 4))))", [1, 1, 4, 4]),
        ("pickle.loads(pickle.dumps(img0))", [0, 0, 40, 30]),
        ("copy.deepcopy(img0.crop((1, 1, 4, 4)))", [1, 1, 4, 4]),
        ("copy.copy(img0.crop((1, 1, 4, 4))).copy()", [1, 1, 4, 4]),
        ("ImageChops.offset(img0.crop((1, 1, 4, 4)), 0)", [1, 1, 4, 4]),
        ("np.asarray(img0) is None or Image.fromarray(np.asarray(img0))", [0, 0, 40, 30]),
        ("Image.fromarray(np.array(img0)[5:25, 10:30])", [10, 5, 30, 25]),
        ("Image.fromarray(np.array(img0)[5:25][2:4, 10:30])", [10, 7, 30, 9]),
        ("Image.fromarray(np.asarray(img0.crop((10, 5, 30, 25)))[2:4, 3:6])", [13, 7, 16, 9]),
        ("Image.fromarray(np.array(img0)[::2, ::2])", [0, 0, 40, 30]),
        ("Image.fromarray(np.array(img0)[:, ::-1][5:25, 0:10])", [30, 5, 40, 25]),
        ("Image.fromarray(np.rot90(np.array(img0))[0:10, 0:5])", [30, 0, 40, 5]),
        ("Image.fromarray(np.array(img0)[:, :, 0][5:25, 10:30])", [10, 5, 30, 25]),
        ("Image.fromarray(np.array(img0)[5:25, 10:30].copy())", [10, 5, 30, 25]),
    ],
)
def test_the_box_follows_the_operations(host, code, box):
    imports = "import copy, pickle\nimport numpy as np\nfrom PIL import Image, ImageChops, ImageEnhance, ImageFilter, ImageOps\n"
    found = provenance(host, imports + code, content())
    assert (found["source"], found["box"]) == ("cat.png", box)
    assert all(step["name"] for step in found["steps"]) and len(found["steps"]) <= 8


@pytest.mark.parametrize(
    "code",
    [
        "a = np.array(img0)[5:25, 10:30]; a[0, 0] = 255; Image.fromarray(a)",
        "a = np.array(img0); a[3] = 0; Image.fromarray(a[::2, ::2])",
        "Image.fromarray(np.lib.stride_tricks.as_strided(np.array(img0), (30, 40, 3), (120, 0, 1)))",
        "Image.fromarray(np.array(img0)[2:9, 3:9].copy())",  # too small to be told from chance
        "Image.fromarray(np.array(img0)[5:25, 10:30][::-1].copy())",
        "Image.fromarray(np.array(img0) // 2)",
        "Image.fromarray(np.zeros((30, 40, 3), np.uint8) + 9)",
        "Image.new('RGB', (40, 30))",
        "Image.frombytes('RGB', (1, 1), b'abc')",
    ],
)
def test_pixels_that_were_made_have_no_source(host, code):
    imports = "import numpy as np\nfrom PIL import Image\n"
    found = provenance(host, imports + "\n".join(code.split("; ")), content())
    assert (found["source"], found["box"]) == (None, None)


def test_an_array_of_a_closed_image_keeps_its_place(host):
    code = "import numpy as np\nfrom PIL import Image\nwith Image.open('cat.png') as image:\n    a = np.array(image)\nimage.close()\n"
    assert provenance(host, f"{code}Image.fromarray(a[5:25, 10:30])", content())["box"] == [10, 5, 30, 25]


def test_steps_are_told_with_their_arguments(host):
    code = (
        "from PIL import Image, ImageFilter\n"
        "img0.crop((10, 5, 30, 25)).resize((100, 100), Image.Resampling.LANCZOS).rotate(5, expand=True)"
        ".convert('L').filter(ImageFilter.GaussianBlur(2)).point(lambda v: v)"
    )
    assert provenance(host, code, content())["steps"] == [
        {"name": "crop", "arguments": {"box": [10, 5, 30, 25]}},
        {"name": "resize", "arguments": {"size": [100, 100], "resample": "LANCZOS"}},
        {"name": "rotate", "arguments": {"angle": 5, "expand": True}},
        {"name": "convert", "arguments": {"mode": "L"}},
        {"name": "filter", "arguments": {"filter": "GaussianBlur"}},
        {"name": "point", "arguments": {"lut": "<lambda>"}},
    ]


def test_changes_in_place_are_steps(host):
    code = (
        "from PIL import Image, ImageDraw\nimage = img0.copy()\nimage.thumbnail((20, 15))\n"
        "draw = ImageDraw.Draw(image)\nfor i in range(5):\n    image.putpixel((i, i), (1, 1, 1))\n"
        "image.paste((0, 0, 0), (0, 0, 2, 2))\nimage"
    )
    found = provenance(host, code, content())
    assert [step["name"] for step in found["steps"]] == ["thumbnail", "draw", "putpixel", "paste"]
    assert (found["source"], found["box"]) == ("cat.png", [0, 0, 40, 30])


def test_a_thumbnail_keeps_the_box(host):
    code = "image = img0.crop((0, 0, 20, 20))\nimage.thumbnail((10, 10))\nimage.crop((5, 5, 10, 10))"
    assert provenance(host, code, content())["box"] == [10, 10, 20, 20]


def test_a_draft_of_a_jpeg_keeps_the_box(host):
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (400, 300), "red").save(buffer, "JPEG")
    code = "from PIL import Image\nimage = Image.open('a.jpg')\nimage.draft('RGB', (200, 150))\nimage.crop((0, 0, 100, 75))"
    assert provenance(host, code, ("a.jpg", buffer.getvalue(), None, None))["box"] == [0, 0, 200, 150]


def test_a_saved_file_keeps_its_trail_until_it_is_replaced(host):
    host.run("from PIL import Image\nimg0.crop((1, 2, 30, 20)).save('part.png')", content())
    found = provenance(host, "Image.open('part.png').crop((1, 1, 3, 3))")
    assert (found["source"], found["box"]) == ("cat.png", [2, 3, 4, 5])
    reply = host.run("img0.crop((1, 2, 30, 20)).resize((5, 5)).save('other.png')")
    assert reply["images"][0]["provenance"]["source"] == "cat.png"
    assert [step["name"] for step in reply["images"][0]["provenance"]["steps"]] == ["crop", "resize"]
    data = (Path(host.scratch) / "part.png").read_bytes()
    found = provenance(
        host, f"import os\nos.remove('part.png')\nopen('part.png', 'wb').write({data!r})\nImage.open('part.png')"
    )
    assert found["source"] is None


def test_the_source_is_not_another_file_of_its_name(host):
    host.run(
        "import os\nfrom PIL import Image\nos.remove('cat.png')\nImage.new('RGB', (40, 30)).save('cat.png')", content()
    )
    assert provenance(host, "Image.open('cat.png')")["source"] is None


def test_steps_are_bounded(host):
    code = "image = img0\nfor i in range(100):\n    image = image.rotate(i + 1)\nimage"
    steps = provenance(host, code, content())["steps"]
    assert (
        len(steps) == MAX_STEPS and steps[0]["arguments"] == {"angle": 1} and steps[-1]["arguments"] == {"angle": 100}
    )


def test_the_code_sees_nothing_of_it(host):
    assert host.run("img0.crop((0, 0, 1, 1)).info", content())["value"] == "{}"
    assert host.run("img0.crop((0, 0, 2, 2)) == img0.crop((0, 0, 2, 2)).copy()")["value"] == "True"


OPERATIONS = st.one_of(
    st.tuples(st.just("crop"), st.integers(0, 9), st.integers(0, 9), st.integers(10, 25), st.integers(10, 25)),
    st.tuples(st.just("transpose"), st.integers(0, 6)),
    st.tuples(st.just("double")),
)


@given(st.lists(OPERATIONS, max_size=6))
def test_geometry_agrees_with_the_pixels(operations):
    """Where the matrix says a pixel comes from, there it comes from."""
    image, trail = source(), Trail("s", SIZE, IDENTITY)
    for name, *arguments in operations:
        if name == "crop":
            left, upper, right, lower = arguments
            box = (left, upper, min(right, image.width), min(lower, image.height))
            if box[0] >= box[2] or box[1] >= box[3]:
                continue
            trail = trail.after(name, {}, (1, 0, left, 0, 1, upper))
            image = image.crop(box)
        elif name == "transpose":
            trail = trail.after(name, {}, turned(arguments[0], image.size))
            image = image.transpose(arguments[0])
        else:
            size = (image.width * 2, image.height * 2)
            trail = trail.after(name, {}, scaled((0, 0, *image.size), size))
            image = image.resize(size, PIL.Image.Resampling.NEAREST)
    reds, greens = image.getchannel(0).getextrema(), image.getchannel(1).getextrema()
    left, upper, right, lower = trail.box(image.size)
    assert [math.floor(left), math.floor(upper), math.ceil(right), math.ceil(lower)] == [
        reds[0],
        greens[0],
        reds[1] + 1,
        greens[1] + 1,
    ]
    a, b, c, d, e, f = trail.matrix
    x, y = image.width - 0.5, 0.5
    assert image.getpixel((image.width - 1, 0))[:2] == (int(a * x + b * y + c), int(d * x + e * y + f))


def test_arguments_are_short_json():
    assert short(float("nan")) == "float" and short(10**30) == "int" and short("x" * 1000) == "x" * 80
    assert short([[1, [2, [3]]]]) == [[1, "list"]] and short(numpy.float32(0.5)) == 0.5
    assert shortened({"a": ["x" * 80] * 8, "b": ["y" * 80] * 8}) == {}

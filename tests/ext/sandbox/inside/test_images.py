"""Images in and out of a session."""

import io
import os
import struct
import zlib

import numpy
import PIL.Image
import pytest

from turnwise.ext.sandbox.inside.worker import MOST_MAPPED


def picture(size=(40, 30)):
    """Every pixel has a colour of its own."""
    x, y = numpy.meshgrid(numpy.arange(size[0]), numpy.arange(size[1]))
    return PIL.Image.fromarray(numpy.stack([x, y, (x * 7 + y * 3) % 256], axis=2).astype(numpy.uint8))


def encoded(image, kind="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def file(name="cat.png", image=None):
    return (name, encoded(image or picture()), None, None)


def names(reply):
    assert reply["status"] == "ok", reply
    return [image["name"] for image in reply["images"]]


def test_shown_images_come_back_as_they_are(host):
    reply = host.run(
        "from PIL import Image\n"
        "show(Image.new('L', (3, 2), 7), Image.new('RGB', (2, 3), 'red'))\n"
        "Image.new('RGBA', (1, 1), (1, 2, 3, 4)).show()\n"
        "Image.new('RGB', (5, 5))"
    )
    assert names(reply) == ["show", "show", "show", "value"] and reply["value"] is None
    assert [(image["mode"], image["size"]) for image in reply["images"]] == [
        ("L", [3, 2]),
        ("RGB", [2, 3]),
        ("RGBA", [1, 1]),
        ("RGB", [5, 5]),
    ]
    assert host.blobs[:3] == [b"\x07" * 6, b"\xff\x00\x00" * 6, b"\x01\x02\x03\x04"]


@pytest.mark.parametrize(
    ("expression", "mode", "pixels"),
    [
        ("np.array([[0, 255]], np.uint8)", "L", b"\x00\xff"),
        ("np.array([[0.0, 0.5, 1.0]])", "L", b"\x00\x80\xff"),
        ("np.array([[0.0, 128.0, 255.0]])", "L", b"\x00\x80\xff"),
        ("np.array([[True, False]])", "L", b"\xff\x00"),
        ("np.array([[-5, 300]])", "L", b"\x00\xff"),
        ("np.array([[np.nan, 1.0]])", "L", b"\x00\xff"),
        ("np.array([[[1], [2]]], np.uint8)", "L", b"\x01\x02"),
        ("np.array([[[1, 2, 3]]], np.uint8)", "RGB", b"\x01\x02\x03"),
        ("np.array([[[1, 2, 3, 4]]], np.uint8)", "RGBA", b"\x01\x02\x03\x04"),
        ("np.arange(12, dtype=np.uint8).reshape(2, 2, 3)[::-1]", "RGB", bytes([*range(6, 12), *range(6)])),
    ],
)
def test_arrays_are_images(host, expression, mode, pixels):
    reply = host.run(f"import numpy as np\nshow({expression})")
    assert names(reply) == ["show"] and reply["images"][0]["mode"] == mode and host.blobs == [pixels]


@pytest.mark.parametrize(
    "expression",
    ["np.zeros(3)", "np.zeros((2, 2, 2))", "np.array([['a']])", "'text'", "None", "np.zeros((1, 1, 1, 3))"],
)
def test_what_is_no_image_cannot_be_shown(host, expression):
    reply = host.run(f"import numpy as np\nshow({expression})")
    assert reply["failure"]["kind"] in ("TypeError", "ValueError") and "show() takes" in reply["failure"]["message"]


def test_an_array_as_the_last_expression_is_text(host):
    reply = host.run("import numpy as np\nnp.zeros((2, 2))")
    assert reply["value"].startswith("array(") and reply["images"] == []


@pytest.mark.parametrize(
    ("code", "mode", "pixels"),
    [
        ("Image.new('1', (1, 1), 1)", "L", b"\xff"),
        ("Image.new('CMYK', (1, 1), (0, 0, 0, 0))", "RGB", b"\xff\xff\xff"),
        ("Image.new('LA', (1, 1), (9, 5))", "RGBA", b"\x09\x09\x09\x05"),
        ("Image.new('RGB', (1, 1), 'red').quantize(2)", "RGB", b"\xff\x00\x00"),
        ("Image.new('I;16', (1, 1), 65535)", "L", b"\xff"),
        ("Image.new('I', (1, 1), 200)", "L", b"\xc8"),
        ("Image.new('F', (1, 1), 0.2)", "L", b"\x33"),
        ("Image.new('F', (1, 1), -7.0)", "L", b"\x00"),
        ("Image.new('HSV', (1, 1), (0, 255, 255))", "RGB", b"\xff\x00\x00"),
    ],
)
def test_other_modes_are_converted(host, code, mode, pixels):
    reply = host.run(f"from PIL import Image\n{code}")
    assert (reply["images"][0]["mode"], host.blobs) == (mode, [pixels])


def test_figures_are_shown_and_closed(host):
    reply = host.run(
        "import matplotlib.pyplot as plt\nfor i in range(2):\n    plt.figure(figsize=(2, 1))\n    plt.plot([i, 1])\nplt.show()\nplt.get_fignums()"
    )
    assert names(reply) == ["figure", "figure"] and reply["value"] == "[]"
    assert {tuple(image["size"]) for image in reply["images"]} == {(200, 100)}
    assert reply["images"][0]["mode"] == "RGB" and len(set(host.blobs[0])) > 5


@pytest.mark.parametrize("code", ["fig", "ax", "show(fig)", "fig.show()"])
def test_a_figure_that_is_shown_is_closed(host, code):
    reply = host.run(
        f"import matplotlib.pyplot as plt\nfig, ax = plt.subplots(figsize=(2, 2))\nax.plot([1, 2])\n{code}"
    )
    assert names(reply) == ["value" if code in ("fig", "ax") else "figure"]
    assert host.run("plt.get_fignums()")["value"] == "[]"


def test_a_figure_that_was_not_shown_stays_open(host):
    assert names(host.run("import matplotlib.pyplot as plt\nfig = plt.figure(figsize=(2, 2))\nNone")) == []
    assert names(host.run("plt.show()")) == ["figure"]


def test_a_figure_without_pyplot_and_a_transparent_one(host):
    reply = host.run("from matplotlib.figure import Figure\nFigure(figsize=(1, 1))")
    assert reply["images"][0]["mode"] == "RGB"
    reply = host.run("f = Figure(figsize=(1, 1))\nf.patch.set_alpha(0)\nf")
    assert reply["images"][0]["mode"] == "RGBA"


def test_a_huge_figure_is_left_out(host):
    reply = host.run("from matplotlib.figure import Figure\nFigure(figsize=(10000, 10000))")
    assert names(reply) == [] and "1 images left out" in reply["notices"][0]


def test_saved_files_come_back_when_they_are_new_or_changed(host):
    assert names(
        host.run("from PIL import Image\nImage.new('RGB', (3, 3), 'red').save('a.png')\nopen('b.txt', 'w').close()")
    ) == ["a.png"]
    assert host.blobs == [b"\xff\x00\x00" * 9]
    assert names(host.run("1")) == []
    assert names(host.run("Image.new('RGB', (3, 3), 'blue').save('a.png')\nImage.new('L', (2, 2)).save('c.JPG')")) == [
        "a.png",
        "c.JPG",
    ]
    assert names(host.run("import os\nos.remove('a.png')")) == []


def test_saved_figures_come_back(host):
    reply = host.run(
        "import matplotlib.pyplot as plt\nplt.figure(figsize=(2, 1))\nplt.plot([1, 2])\nplt.savefig('f.png')\nplt.show()"
    )
    assert names(reply) == ["figure"]  # the same pixels are not told twice


def test_the_same_pixels_come_back_once_a_call(host):
    host.run("from PIL import Image\nimage = Image.new('RGB', (4, 4), 'green')")
    assert names(host.run("image.save('x.png')\nshow(image, image.copy())\nimage")) == ["show"]
    assert names(host.run("show(image, image.convert('RGBA'))")) == ["show"]
    assert names(host.run("show(image, image.resize((2, 8)))")) == ["show", "show"]
    assert names(host.run("image")) == ["value"]


def test_links_folders_and_pipes_are_not_read(host):
    outside = os.path.join(os.path.dirname(host.scratch), "outside.png")
    picture().save(outside)
    try:
        code = f"import os\nos.symlink({outside!r}, 'link.png')\nos.mkdir('folder.png')\nos.mkfifo('pipe.png')"
        assert names(host.run(code)) == []
    finally:
        os.unlink(outside)


def test_a_folder_that_cannot_be_read_is_a_notice(host):
    reply = host.run(f"import os\nos.rename({host.scratch!r}, {host.scratch + '.away'!r})")
    os.rename(host.scratch + ".away", host.scratch)
    assert reply["notices"] == ["image files that the code saved could not be read (FileNotFoundError)"]


def test_broken_image_files_are_a_notice(host):
    reply = host.run("open('a.png', 'wb').write(b'no image')\nopen('b.jpg', 'wb').close()")
    assert names(reply) == [] and [n.split(":")[0] for n in reply["notices"]] == ["a.png", "b.jpg"]
    data = encoded(picture((200, 200)))
    reply = host.run(f"open('cut.png', 'wb').write({data[: len(data) // 2]!r})")
    assert names(reply) == [] and reply["notices"][0].startswith("cut.png: not a readable image")


def bomb(width, height):
    """A PNG that says it is large."""

    def chunk(kind, data):
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    header = struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_decompression_bomb_is_left_out_with_a_notice(host):
    for size in ((60_000, 60_000), (2_000_000, 1)):
        reply = host.run(f"open('bomb.png', 'wb').write({bomb(*size)!r})")
        assert names(reply) == [] and "left out" in reply["notices"][0] and reply["stderr"] == ""


def test_count_and_pixels_are_limited(session_with):
    host = session_with(images=2, pixels=1000)
    reply = host.run("from PIL import Image\nfor i in range(4):\n    show(Image.new('L', (2, 2), i))")
    assert names(reply) == ["show", "show"]
    assert reply["notices"] == ["2 images left out: a call gives back at most 2 images and 1000 pixels"]
    assert names(host.run("show(Image.new('L', (40, 40)))\nshow(Image.new('L', (10, 10)))")) == ["show"]
    assert names(host.run("show(Image.new('L', (30, 30)))\nshow(Image.new('L', (11, 11)))")) == ["show"]
    assert "0 x 5" in host.run("Image.new('L', (0, 5))")["notices"][0]


def test_given_images_are_files_and_variables(host):
    raw = picture((6, 4))
    reply = host.run(
        "sorted(images), img0.size, img1.size, image_filename, image_path, images['raw'].getpixel((5, 3))",
        file(),
        ("raw", raw.tobytes(), "RGB", [6, 4]),
    )
    assert reply["value"] == "(['cat.png', 'raw'], (40, 30), (6, 4), 'cat.png', 'cat.png', (5, 3, 44))"
    assert reply["images"] == []
    reply = host.run("from PIL import Image\nImage.open(image_filename)")
    assert host.pictures(reply)[0].tobytes() == picture().tobytes()
    assert host.run("img2.size, len(images)", file("dog.png"))["value"] == "((40, 30), 3)"


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_raw_pixels_are_an_image_like_any_other(host, mode):
    image = picture((6, 4)).convert(mode)
    given = ("raw", image.tobytes(), mode, [6, 4])
    code = (
        "import copy, pickle\nfrom PIL import Image\nshow(pickle.loads(pickle.dumps(img0)))\nimg0.putpixel((0, 0), 9)\n"
    )
    code += "show(copy.deepcopy(img0))\nimg0.save('raw.png')\n(img0.mode, img0.size, img0.info, type(img0.copy()) is Image.Image)"
    reply = host.run(code, given)
    assert reply["value"] == f"('{mode}', (6, 4), {{}}, True)"
    assert host.pictures(reply)[0].tobytes() == image.tobytes() and len(reply["images"]) == 2
    assert [picture["provenance"]["source"] for picture in reply["images"]] == ["raw", "raw"]


def test_images_can_come_in_the_frame_itself(host):
    data = os.urandom(300 * 300 * 3)
    reply = host.run("show(img1)", file(), ("noise", data, "RGB", [300, 300]), inband=True)
    assert host.blobs == [data] and names(reply) == ["show"]


def test_large_images_are_taken_over_when_they_are_used(host):
    count = "import os\nlen(os.listdir('/proc/self/fd'))"
    before = int(host.run(count)["value"])
    given = [(f"{n}.raw", bytes([n]) * 90_000, "L", [300, 300]) for n in range(20)]
    code = (
        "[images[f'{n}.raw'].getextrema() for n in range(20)] == [(n, n) for n in range(20)] and img19.getpixel((9, 9))"
    )
    assert host.run(code, *given)["value"] == "19"
    assert int(host.run(count)["value"]) == before + MOST_MAPPED


def test_many_images_at_once(host):
    given = [(f"{n}.raw", bytes([n]) * 4, "L", [2, 2]) for n in range(64)]
    assert host.run("sum(image.getpixel((1, 1)) for image in images.values())", *given)["value"] == str(sum(range(64)))


def test_what_was_given_cannot_be_altered(session_with):
    host = session_with(ordinary=True)
    code = "from PIL import ImageDraw\nfor image in (img0, images['cat.png'], images.get('cat.png')):\n    ImageDraw.Draw(image).rectangle((0, 0, 40, 30), fill='red')\n    image.load()[0, 0] = (1, 2, 3)"
    assert host.run(code, file())["status"] == "ok"
    assert (
        host.run("images['cat.png'].getpixel((0, 0)), dict(images.items())['cat.png'].getpixel((0, 1))")["value"]
        == "((0, 0, 0), (0, 1, 3))"
    )
    reply = host.run("img0.save('cat.png')")
    assert (reply["status"], reply["failure"]["kind"]) == ("denied", "PermissionError")
    reply = host.run("from PIL import Image\nImage.open('cat.png')")
    assert host.pictures(reply)[0].tobytes() == picture().tobytes()


def test_own_images_may_be_added(host):
    host.run("images['mine'] = img0.crop((0, 0, 2, 2))\nimages['cat.png'] = 5", file())
    assert host.run("images['mine'].size, images['cat.png'], images.get('none', 3)")["value"] == "((2, 2), 5, 3)"


def test_a_name_is_only_a_name(host):
    reply = host.run(
        "import os\nsorted(os.listdir()), image_filename", ("../../evil/a.png", encoded(picture()), None, None)
    )
    assert reply["value"] == "(['a.png'], 'a.png')"


def test_a_link_of_the_same_name_is_replaced(host):
    host.run("import os\nopen('target', 'w').close()\nos.symlink('target', 'cat.png')")
    assert host.run("os.path.islink('cat.png'), os.path.getsize('target')", file())["value"] == "(False, 0)"


def test_a_file_that_is_no_image_is_a_notice_and_still_a_file(host):
    reply = host.run("open(image_filename).read()", ("notes.png", b"no image", None, None))
    assert reply["value"] == "'no image'" and reply["notices"] == [
        "notes.png: not a readable image (UnidentifiedImageError)"
    ]


def test_a_session_is_stopped_while_it_reads_files_and_goes_on(host):
    """The time limit covers what happens after the code, too."""
    import signal
    import threading

    host.run("1")
    code = "import PIL.Image, time\nopen('a.png', 'wb').close()\nPIL.Image.open = lambda *a: time.sleep(60)"
    timer = threading.Timer(0.3, os.kill, (host.pid, signal.SIGINT))
    timer.start()
    reply = host.run(code)
    timer.join()
    assert reply["status"] == "timeout" and "stopped while reading" in reply["notices"][0]
    assert host.run("1")["value"] == "1"

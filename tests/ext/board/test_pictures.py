"""Only images, and only those that a run keeps, reach a page."""

import base64
import json
import os

import pytest

from turnwise.ext.board.images import LARGEST_INLINE, Pictures, image_bytes
from turnwise.ext.board.table import NotThere
from turnwise.types import Image

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
NAME = "images/0123456789abcdef.png"


@pytest.fixture
def kept(run_dir):
    (run_dir.path / "images").mkdir()
    (run_dir.path / NAME).write_bytes(PNG)
    return run_dir


def test_inline_images_pass(run_dir):
    pictures = Pictures(run_dir)
    for kind in ("png", "jpeg", "gif", "webp"):
        source = f"data:image/{kind};base64,{base64.b64encode(PNG).decode()}"
        assert pictures.url(source) == source


@pytest.mark.parametrize(
    "source",
    [
        "data:image/svg+xml;base64,PHN2Zz4=",
        "data:text/html;base64,PGI+",
        "data:image/png,raw",
        "data:image/png;base64,<script>",
        'data:image/png;base64,AAAA" onerror="x',
        "data:image/png;base64,AA\nAA",
        "data:image/png;base64," + "A" * LARGEST_INLINE,
        "http://example.org/a.png",
        "//example.org/a.png",
        "javascript:alert(1)",
        "/etc/passwd",
        "images/0123456789abcdef.png",
        "",
    ],
)
def test_nothing_else_has_an_address(kept, source):
    reference = Pictures(kept).reference(Image(source))
    assert reference["url"] is None and len(reference["source"]) <= 200


def test_a_file_is_found_through_the_index(kept):
    index = kept.path / "images/index.jsonl"
    lines = [{"source": "data/a b.png", "file": NAME}, {"source": "x.png", "file": "../secret.png"}, {"source": 3}]
    index.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")
    pictures = Pictures(kept, "my run/1")
    expected = "/api/runs/my%20run%2F1/image?name=images%2F0123456789abcdef.png"
    assert pictures.reference(Image("data/a b.png")) == {"url": expected, "source": "data/a b.png"}
    assert pictures.url("x.png") is None
    with index.open("a") as file:
        file.write(json.dumps({"source": "later.png", "file": NAME}) + "\n")
    assert Pictures(kept).url("later.png") == "/api/runs/first/image?name=images%2F0123456789abcdef.png"


def test_bytes_come_with_the_type_of_their_content(kept):
    assert image_bytes(kept, NAME) == (PNG, "image/png")
    (kept.path / "images/ffffffff.png").write_bytes(b"GIF89a...")
    assert image_bytes(kept, "images/ffffffff.png")[1] == "image/gif"


@pytest.mark.parametrize(
    "name",
    [
        "images/../config.yaml",
        "../first/images/0123456789abcdef.png",
        "images/0123456789abcdef.svg",
        "images/0123456789ABCDEF.png",
        "images/index.jsonl",
        "images/short.png",
        "/images/0123456789abcdef.png",
        "images/0123456789abcdef.png\n",
        "images/0123456789abcdef.png\0",
        "images/00000000.png",
        "config.yaml",
        "",
    ],
)
def test_other_names_are_not_there(kept, name):
    with pytest.raises(NotThere):
        image_bytes(kept, name)


def test_what_is_no_image_leads_elsewhere_or_is_no_file_is_not_there(kept, tmp_path):
    images = kept.path / "images"
    (images / "aaaaaaaa.png").write_bytes(b"<svg onload=alert(1)>")
    outside = tmp_path / "secret.png"
    outside.write_bytes(PNG)
    (images / "bbbbbbbb.png").symlink_to(outside)
    (images / "cccccccc.png").symlink_to("cccccccc.png")
    (images / "dddddddd.png").mkdir()
    os.mkfifo(images / "eeeeeeee.png")
    for letter in "abcde":
        with pytest.raises(NotThere):
            image_bytes(kept, f"images/{letter * 8}.png")


def test_an_images_folder_that_leads_out_of_the_run_is_not_followed(run_dir, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "aaaaaaaa.png").write_bytes(PNG)
    (run_dir.path / "images").symlink_to(elsewhere)
    with pytest.raises(NotThere):
        image_bytes(run_dir, "images/aaaaaaaa.png")

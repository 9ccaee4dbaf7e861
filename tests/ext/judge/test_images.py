"""Images become small data URLs."""

import base64
import io
from pathlib import Path

import pytest

from turnwise.data.images.files import ImageForm, encoded
from turnwise.errors import DataError, ScoringFailed
from turnwise.ext.judge.judge import data_url, fitting
from turnwise.types import Image

pillow = pytest.importorskip("PIL.Image")


def saved(folder: Path, mode: str, size: tuple[int, int], colour: object, kind: str = "png") -> Image:
    path = folder / f"picture.{kind}"
    pillow.new(mode, size, colour).save(path)
    return Image(str(path))


def opened(url: str):  # type: ignore[no-untyped-def]
    head, data = url.split(",")
    assert head == "data:image/jpeg;base64"
    return pillow.open(io.BytesIO(base64.b64decode(data)))


@pytest.mark.parametrize("kind", ["png", "jpg", "bmp"])
def test_large_images_are_scaled_down_and_keep_their_shape(tmp_path: Path, kind: str) -> None:
    picture = opened(data_url(saved(tmp_path, "RGB", (2000, 1000), "red", kind), 20_000))
    assert picture.width * picture.height <= 20_000 and picture.size == (200, 100)
    red, green, blue = picture.getpixel((50, 50))
    assert red > 240 and green < 10 and blue < 10


def test_small_images_keep_their_size_and_equal_ones_give_equal_urls(tmp_path: Path) -> None:
    image = saved(tmp_path, "RGB", (30, 20), "blue")
    url = data_url(image, 10_000)
    assert opened(url).size == (30, 20) and url == data_url(image, 10_000)
    again = Image("data:image/png;base64," + base64.b64encode(Path(image.source).read_bytes()).decode())
    assert data_url(again, 10_000) == url


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "I;16", "CMYK", "1"])
def test_every_kind_of_image_can_be_shown(tmp_path: Path, mode: str) -> None:
    clear = {"RGBA": (0, 0, 0, 0), "LA": (0, 0), "CMYK": (0, 0, 0, 0)}.get(mode, 255)
    kind = "tiff" if mode == "CMYK" else "png"
    picture = opened(data_url(saved(tmp_path, mode, (8, 8), clear, kind), 10_000))
    if mode in ("RGBA", "LA", "CMYK"):
        assert min(picture.getpixel((4, 4))) > 240


@pytest.mark.parametrize(
    ("width", "height", "most"), [(10_000, 1, 5), (1, 10_000, 5), (7, 7, 48), (100, 100, 1), (3, 3, 9)]
)
def test_no_shape_exceeds_the_limit(width: int, height: int, most: int) -> None:
    wide, high = fitting(width, height, most)
    assert 1 <= wide <= width and 1 <= high <= height and wide * high <= most


def test_unreadable_images_say_so(tmp_path: Path) -> None:
    text = tmp_path / "a.png"
    text.write_text("not an image")
    cut = tmp_path / "cut.png"
    whole = io.BytesIO()
    pillow.effect_noise((64, 64), 50).save(whole, "PNG")
    cut.write_bytes(whole.getvalue()[:-200])
    for source in (str(text), str(cut), str(tmp_path / "missing.png"), "data:image/png;base64,!!!", "data:,x", "a\0b"):
        with pytest.raises(ScoringFailed, match="the image .*cannot be read"):
            data_url(Image(source), 100)
    with pytest.raises(DataError, match="not fetched"):
        data_url(Image("http://example.com/a.png"), 100)


def test_a_judge_is_shown_an_image_upright_as_the_policy_is(tmp_path: Path) -> None:
    lying = pillow.new("RGB", (30, 10), "red")
    notes = lying.getexif()
    notes[0x0112] = 6
    lying.save(tmp_path / "lying.jpg", exif=notes)
    assert opened(data_url(Image(str(tmp_path / "lying.jpg")), 10_000)).size == (10, 30)


def test_no_file_makes_pillow_start_a_program() -> None:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    url = "data:application/postscript;base64," + base64.b64encode(script).decode()
    with pytest.raises(ScoringFailed, match="cannot identify image file"):
        data_url(Image(url), 10_000)


def test_an_image_whose_notes_break_its_reader_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    notes = pillow.Exif()
    notes[0x0112], notes[0x010E] = 6, "words"
    path = tmp_path / "a.jpg"
    pillow.new("RGB", (9, 7)).save(path, exif=notes.tobytes())
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\x01\x0e", b"\x01\x00", 1))  # the words are now its width
    with pytest.raises(ScoringFailed, match="cannot be read"):
        data_url(Image(str(path)), 10_000)
    with pytest.raises(DataError, match="cannot be unpacked"):
        encoded(path.read_bytes(), ImageForm.png)

"""A model's own image processor: blocks of tokens and arrays, the same picture however it is stored, hostile bytes."""

import io
import json
import pickle
import struct
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import vision_processors as made
from PIL import Image

from turnwise.chat.images import processor
from turnwise.chat.images.pixels import shown_size, unpack
from turnwise.chat.images.processor import ImageProcessor, find_image_processor
from turnwise.chat.tokenizer import Tokenizer
from turnwise.errors import DataError, TemplateError
from turnwise.system.image_bytes import digest_of

Find = Callable[..., ImageProcessor]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Find:
    folders: dict[str, tuple[Path, Tokenizer]] = {}

    def find(name: str, max_pixels: int | None = None) -> ImageProcessor:
        if name not in folders:
            folder = made.build(name, tmp_path_factory.mktemp(name))
            folders[name] = folder, Tokenizer(folder)
        found = find_image_processor(*folders[name], max_pixels)
        assert found is not None
        return found

    return find


@pytest.mark.parametrize("name", made.KINDS)
@pytest.mark.parametrize("size", [(32, 32), (47, 21), (1, 1), (200, 150)])
def test_a_block_is_what_the_processor_writes_between_words(seeing: Find, name: str, size: tuple[int, int]) -> None:
    images = seeing(name)
    media = images.prepare(made.encoded(made.picture(*size)))
    token, encode = images.image_token, images._tokenizer.encode
    whole = images._processor(images=[made.picture(*size)], text=[f"see {token} it"], return_tensors="np")
    assert whole["input_ids"][0].tolist() == [*encode("see ").ids, *media.token_ids.tolist(), *encode(" it").ids]
    assert media.features == (media.token_ids == made.ids(name)[made.KINDS[name].image_token]).sum() > 0
    for key, array in media.arrays.items():
        assert np.array_equal(array, whole[key]), key
    assert set(media.arrays) == set(images._processor.image_processor.model_input_names)


def test_row_and_column_marks_stand_in_the_block_and_take_no_features(seeing: Find) -> None:
    media = seeing("smolvlm").prepare(made.encoded(made.picture(32, 16)))
    marks = [made.ids("smolvlm")[mark] for mark in ("<row_1_col_1>", "<row_1_col_2>", "<global-img>")]
    assert [one for one in media.token_ids[~media.takes].tolist() if one in marks] == marks
    assert media.features == 3 * 4


def test_the_same_picture_is_the_same_pixels_however_it_is_stored(seeing: Find) -> None:
    images, plain = seeing("qwen2_5_vl"), made.picture()
    first = images.prepare(made.encoded(plain))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = made.encoded(plain.transpose(Image.Transpose.ROTATE_90), exif=exif)
    stored = {
        "bmp": made.encoded(plain, "bmp"),
        "webp": made.encoded(plain, "webp", lossless=True),
        "opaque": made.encoded(plain.convert("RGBA")),
        "turned": turned,
    }
    for form, content in stored.items():
        media = images.prepare(content)
        assert np.array_equal(media.arrays["pixel_values"], first.arrays["pixel_values"]), form
        assert media.digest == digest_of(media.content)
        assert images.prepare(media.content) is media, "what is shown is prepared as itself"
    assert images.prepare(stored["bmp"]).content == stored["bmp"], "bytes stay as they are where every reader agrees"
    assert images.prepare(turned).content != turned


def test_gray_palette_sixteen_bits_transparent_cmyk_and_animated_images_are_shown() -> None:
    gray = made.picture(mode="L")
    wide = Image.fromarray(np.asarray(gray).astype(np.uint16) * 256)
    assert np.array_equal(unpack(made.encoded(wide), None).picture, unpack(made.encoded(gray), None).picture)
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert unpack(made.encoded(clear), None).picture.getpixel((0, 0)) == (255, 255, 255)
    named = Image.new("P", (4, 4), 0)
    assert unpack(made.encoded(named, "gif", transparency=0), None).picture.getpixel((0, 0)) == (255, 255, 255)
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    moving = made.encoded(frames[0], "gif", save_all=True, append_images=frames[1:])
    assert unpack(moving, None).picture.getpixel((0, 0)) == (255, 0, 0)
    for mode in ("L", "CMYK"):
        assert unpack(made.encoded(made.picture(mode=mode), "jpeg"), None).picture.mode == "RGB"
    assert unpack(made.encoded(made.picture(mode="LA")), None).picture.mode == "RGB"


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is huge."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not PNG, JPEG"),
        (b"hello", "not PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not PNG, JPEG"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "cannot be read"),
        (made.encoded(made.picture())[:-200], "cannot be read"),
        (made.encoded(made.picture(), "jpeg")[:60], "cannot be read"),
        (b"BM" + b"\xff" * 60, "cannot be read"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "cannot be read"),
        (bomb(60_000, 60_000), "at most 64000000|decompression bomb"),
        (bomb(0, 5), "cannot be read"),
    ],
)
def test_hostile_bytes_are_told_apart_in_one_line(seeing: Find, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said) as found:
        seeing("qwen2_5_vl").prepare(content)
    assert "\n" not in str(found.value)


def test_a_shape_that_the_processor_refuses_is_a_clear_error_every_time(seeing: Find) -> None:
    images, line = seeing("qwen2_5_vl"), made.encoded(made.picture(1000, 1))
    for _ in range(2):
        with pytest.raises(DataError, match="takes no image of 1000x1 pixels: ValueError: absolute aspect ratio"):
            images.prepare(line)


def test_an_image_above_the_limit_is_shown_smaller_and_keeps_its_shape(seeing: Find) -> None:
    content = made.encoded(made.picture(60, 30))
    images = seeing("llava_next", 450)
    media = images.prepare(content)
    assert media.arrays["image_sizes"].tolist() == [[15, 30]] and media.digest != digest_of(content)
    with Image.open(io.BytesIO(media.content)) as shown:
        assert shown.size == (30, 15)
    assert images.prepare(content) is media and images.prepare(media.content) is media
    assert unpack(made.encoded(made.picture(9, 9)), 81).content == made.encoded(made.picture(9, 9))
    assert unpack(made.encoded(made.picture(1, 900)), 10).picture.size == (1, 10)


def test_threads_share_one_and_it_goes_when_nobody_holds_it(seeing: Find) -> None:
    images, content = seeing("smolvlm"), made.encoded(made.picture(seed=3))
    ready = threading.Barrier(8)

    def ask(_: int) -> object:
        ready.wait()
        return images.prepare(content)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert all(one is found[0] for one in found)
    del found
    assert digest_of(content) not in images._alive


def test_arrays_are_made_again_when_they_were_not_kept_and_travel_as_they_are(
    seeing: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "KEPT_BYTES", 1)
    images = seeing("qwen3_vl")
    first = images.prepare(made.encoded(made.picture(seed=1)))
    before = first.arrays["pixel_values"]
    images.prepare(made.encoded(made.picture(seed=2)))
    assert list(images._arrays) != [first.digest] and len(images._arrays) == 1
    again = first.arrays["pixel_values"]
    assert again is not before and np.array_equal(again, before) and not again.flags.writeable
    sent = pickle.loads(pickle.dumps(first))
    assert type(sent.arrays) is dict and np.array_equal(sent.arrays["pixel_values"], before)


def test_folders_without_a_processor_read_text_and_broken_ones_are_named(tmp_path: Path) -> None:
    folder = made.build("qwen2_5_vl", tmp_path)
    tokenizer = Tokenizer(folder)
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(TemplateError, match="its image processor cannot be read"):
        find_image_processor(folder, tokenizer, None)
    for name in processor.PROCESSOR_FILES:
        (folder / name).unlink()
    assert find_image_processor(folder, tokenizer, None) is None


def test_the_template_of_an_older_processor_is_found(tmp_path: Path) -> None:
    folder = made.build("llava_next", tmp_path)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": made.LLAVA_TEMPLATE}))
    assert Tokenizer(folder).templates == {"default": made.LLAVA_TEMPLATE}
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(TemplateError, match="the chat template cannot be read"):
        Tokenizer(folder)


def test_what_is_measured_is_bounded_too(seeing: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    images = seeing("qwen2_5_vl")
    with pytest.raises(DataError, match="9000x9000 pixels: at most 64000000"):
        images.measure(io.BytesIO(bomb(9_000, 9_000)))
    turned = Image.Exif()
    turned[0x0112] = 6
    lying = made.picture(112, 56)
    ahead = made.encoded(lying, exif=turned)
    start, end = ahead.index(b"eXIf") - 4, ahead.index(b"eXIf") + 8 + len(turned.tobytes().removeprefix(b"Exif\0\0"))
    behind = ahead[:start] + ahead[end:-12] + ahead[start:end] + ahead[-12:]
    for content in (ahead, behind, made.encoded(lying, "jpeg", exif=turned)):
        assert shown_size(io.BytesIO(content), None) == unpack(content, None).picture.size == (56, 112)
    cut = made.encoded(lying)[:200]
    assert shown_size(io.BytesIO(cut), None) == (112, 56), "its head is enough"
    monkeypatch.setattr(processor, "MOST_SIZES", 2)
    for side in (28, 56, 84, 112):
        held = io.BytesIO(made.encoded(made.picture(side, side)))
        assert len(images.measure(held).token_ids) == len(images.prepare(held.getvalue()).token_ids)
    assert len(images._blocks) <= 2

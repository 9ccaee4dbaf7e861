"""What bytes are images, and of which kind: the same in data, in run folders, on the board and for endpoints."""

import base64

import pytest

from turnwise.storage.images.copies import STORED_NAME, stored_name
from turnwise.system.image_bytes import data_url, file_ending, media_type

IMAGES = {
    b"\x89PNG\r\n\x1a\n....": ("image/png", "png"),
    b"\xff\xd8\xff\xe0": ("image/jpeg", "jpg"),
    b"GIF89a": ("image/gif", "gif"),
    b"RIFF\x00\n\x00\x00WEBP": ("image/webp", "webp"),
    b"BM\x00\x00": ("image/bmp", "bmp"),
}


@pytest.mark.parametrize("content", IMAGES)
def test_kinds_go_by_content(content: bytes) -> None:
    assert (media_type(content), file_ending(content)) == IMAGES[content]
    assert data_url(content) == f"data:{IMAGES[content][0]};base64,{base64.b64encode(content).decode()}"
    name = stored_name(content)
    assert name is not None and STORED_NAME.fullmatch(name)


@pytest.mark.parametrize("content", [b"", b"<svg", b"%PDF", b"RIFF\x00\x00\x00\x00WAVE", b"GIF88a"])
def test_anything_else_is_no_image(content: bytes) -> None:
    assert media_type(content) is file_ending(content) is data_url(content) is stored_name(content) is None

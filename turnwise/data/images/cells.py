"""The images of a row, however a file stores them: bytes, base64, data URLs, paths, members of a tar."""

import base64
import binascii
import hashlib
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from turnwise.data.values import FieldError, as_text, describe, join, shorten
from turnwise.errors import DataError
from turnwise.errors.nearest_name import nearest
from turnwise.system.image_bytes import KINDS, data_url, media_type
from turnwise.system.image_sources import MARK, member_of, members
from turnwise.types import Image

KEYS = ("bytes", "path", "image", "url", "image_url")
"""Under which an object may hold its image; bytes go before a path, as Hugging Face's datasets write both."""
ROOT = "images_from"
"""The column that names a folder or a tar for the paths of its row."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{40,}={0,2}\s*", re.ASCII)
_LEAST_ARRAY = 16
"""Bytes: no image has fewer."""
_OUT = "leads out of"


class ImageCells:
    """Reads the image cells of many rows; equal images that rows hold themselves are kept once.

    `images_from` is a folder or a tar in which every path of a row is looked for. Without it a path is looked for
    beside the data file, and then stands for itself, seen from the current folder.
    """

    def __init__(self, images_from: str | None = None) -> None:
        self.inline_bytes = 0
        """Of the images that stand in the samples themselves."""
        self._from = images_from
        self._urls: dict[bytes, str] = {}
        self._roots: dict[tuple[Path, str], Path] = {}

    def of_row(self, file: Path, column: Any) -> "RowImages":
        """For the images of a row of this file; `column` is what it has under `images_from`."""
        if column is not None:
            return RowImages(self, file, self._root(file, as_text(column, ROOT), ROOT))
        named = self._from
        return RowImages(self, file, None if named is None else self._root(file, named, "data.images_from"))

    def url(self, content: bytes, field: str) -> str:
        """The image as a data: URL; bytes that are no image are a FieldError."""
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if digest not in self._urls:
            url = data_url(content)
            if url is None:
                raise FieldError(field, f"these bytes are not a {KINDS} image")
            self.inline_bytes += len(url)
            self._urls[digest] = url
        return self._urls[digest]

    def _root(self, file: Path, named: str, field: str) -> Path:
        folder = file.parent
        if (folder, named) not in self._roots:
            there = Path(named).expanduser()
            if field == ROOT or not there.exists():
                there = folder / there
            if not (there.is_dir() or (there.is_file() and there.suffix == ".tar")):
                beside = [entry.name for entry in there.parent.iterdir()] if there.parent.is_dir() else []
                hint = nearest(there.name, (entry for entry in beside if entry.endswith(".tar") or "." not in entry))
                raise FieldError(field, f"{there} is neither a folder nor a .tar: {hint}")
            self._roots[folder, named] = there.absolute()
        return self._roots[folder, named]


class RowImages:
    """Reads the image cells of one row."""

    def __init__(self, cells: ImageCells, file: Path, root: Path | None) -> None:
        self._cells = cells
        self._file = file
        self._root = root
        self.names: dict[str, str] = {}
        """The file names of images that the row holds itself, by source."""

    def read(self, value: Any, field: str) -> Image:
        """An image from a path or URL, from bytes, or from an object that holds one of them."""
        match value:
            case str():
                return Image(self.source(as_text(value, field), field))
            case bytes():
                return Image(self._cells.url(value, field))
            case list() if is_array_of_bytes(value):
                return Image(self._cells.url(bytes(value), field))
            case dict():
                return self._from_object(value, field)
            case _:
                raise FieldError(field, f"expected a path, bytes or an object with one of them, got {describe(value)}")

    def source(self, text: str, field: str) -> str:
        """What a text names: itself for an address or a data URL, the image for base64, or a file."""
        if text.startswith(("data:", "http://", "https://")):
            return text
        content = from_base64(text)
        return self.placed(text, field) if content is None else self._cells.url(content, field)

    def placed(self, path: str, field: str) -> str:
        """A path of the row as one that does not depend on where it is read."""
        path = path.removeprefix("file://")
        if self._root is not None:
            return self._under(self._root, path, field)
        if "\0" in path or Path(path).is_absolute():
            return path
        member = member_of(path)
        there = self._file.parent / (path if member is None else member[0])
        if not _is_file(there):
            return path
        return str(there.absolute()) + ("" if member is None else MARK + member[1])

    def tool_image(self, value: Any, field: str) -> Any:
        """What a row gives a tool as its image: paths find their place, all else is left to the tool."""
        match value:
            case str() if not value.startswith(("data:", "http:", "https:")) and from_base64(value) is None:
                return self.placed(value, field)
            case list():
                return [self.tool_image(item, f"{field}[{number}]") for number, item in enumerate(value)]
            case {"path": str()} | {"image": str()} if "bytes" not in value:
                return {
                    key: self.tool_image(item, join(field, key)) if key in ("path", "image") else item
                    for key, item in value.items()
                }
        return value

    def _from_object(self, value: dict[str, Any], field: str) -> Image:
        for key in KEYS:
            if key not in value:
                continue
            inner = value[key]
            if key == "bytes" and isinstance(inner, str):
                content = from_base64(inner, certain=True)
                if content is None:
                    raise FieldError(join(field, key), f"this text is not base64 of a {KINDS} image")
                inner = content
            image = self.read(inner, join(field, key))
            path = value.get("path")
            if key == "bytes" and isinstance(path, str):
                self.names[image.source] = last_name(path)
            return image
        raise FieldError(field, f"an image needs one of {', '.join(KEYS)}")

    def _under(self, root: Path, path: str, field: str) -> str:
        parts = [part for part in PurePosixPath(path).parts if part != "."]
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise FieldError(field, f"{shorten(path)!r} {_OUT} {root}")
        name = "/".join(parts)
        if root.is_dir():
            there = root / name
            if not there.is_file():
                raise FieldError(field, f"there is no file {shorten(name)!r} in {root}")
            if not there.resolve().is_relative_to(root.resolve()):
                raise FieldError(field, f"{shorten(path)!r} {_OUT} {root}")
            return str(there)
        try:
            names = members(root)
        except (DataError, OSError) as error:
            raise FieldError(field, str(error)) from error
        if name not in names:
            raise FieldError(field, f"there is no regular file {shorten(name)!r} in {root}")
        return f"{root}{MARK}{name}"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def is_array_of_bytes(value: Any) -> bool:
    """Whether a list is the content of a file, number by number, as arrays come out of files and of numpy."""
    if not isinstance(value, list) or len(value) < _LEAST_ARRAY or type(value[0]) is not int:
        return False
    return all(type(number) is int and 0 <= number < 256 for number in value)


def last_name(path: str) -> str:
    """`27.png` of a path as any system writes it."""
    return PureWindowsPath(path).name


def from_base64(text: str, *, certain: bool = False) -> bytes | None:
    """The image that a text is, in base64; None for any other text. `certain` says that it is one or nothing."""
    head = text.lstrip()[:24]
    if not certain and (not _BASE64.fullmatch(text[:4096].rstrip("=")) or "." in text):
        return None
    try:
        start = base64.b64decode(head[: len(head) // 4 * 4], validate=True)
        if media_type(start) is None and not (certain and len(head) < 24):
            return None
        content = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None
    return content if media_type(content) is not None else None

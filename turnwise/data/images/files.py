"""A folder of image files: names that lead nowhere else, no picture in the place of another, nothing written twice."""

import contextlib
import enum
import errno
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from turnwise.errors import DataError, TurnwiseError
from turnwise.system.image_bytes import FORMATS, file_ending
from turnwise.system.image_sources import is_file_name

MOST_PIXELS = 100_000_000
"""Of an image that is unpacked to be written in another form."""
QUALITY = 95


class ImageForm(enum.Enum):
    """The format in which image files are written."""

    keep = "keep"
    """The bytes as they are."""
    jpeg = "jpeg"
    """As JPEG, what is transparent on white; a JPEG as it is."""
    png = "png"
    """As PNG; a PNG as it is."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file to write: its name under the folder, with slashes, and what is in it."""

    name: str
    content: bytes


class ImageFolder:
    """Finds each image a name that no other image has, there or in this run; the same ones in every run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._given: dict[str, bytes] = {}
        """The digest of what has each name; letters of either case are one on some systems."""

    def plan(
        self, content: bytes, wanted: str | None, form: ImageForm, refuse: Callable[[str], TurnwiseError]
    ) -> ImageFile:
        """The file for an image; `refuse` makes the error for a name that leads elsewhere."""
        digest = hashlib.blake2b(content, digest_size=16)
        ending = file_ending(content)
        path = PurePosixPath(f"{digest.hexdigest()}.{ending}" if wanted is None else wanted)
        if wanted is not None:
            if wanted.startswith("/") or not all(is_file_name(part) for part in wanted.split("/")):
                raise refuse(f"the name {wanted[:80]!r} is not a plain file name")
            path = path if form is ImageForm.keep else path.with_suffix(f".{ending}")
        for name in (str(path), str(path.with_stem(f"{path.stem}-{digest.hexdigest()[:12]}"))):
            owner = self._given.get(name.lower())
            if owner == digest.digest() or (owner is None and self._is_free(name, content)):
                self._given[name.lower()] = digest.digest()
                return ImageFile(name, content)
        raise refuse(f"{self._path / str(path)} and the name beside it hold other pictures")

    def write(self, file: ImageFile) -> bool:
        """Write it unless it is there; whether it was written. A file appears whole, and replaces none."""
        path = self._path / file.name
        if not path.parent.resolve().is_relative_to(self._path.resolve()):
            raise DataError(f"{path} leads out of {self._path}")
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path):
                return self._is_there(file)
            temporary.write_bytes(file.content)
            _place(temporary, path)
        except FileExistsError:  # somebody was faster
            return self._is_there(file)
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror or error}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return True

    def _is_there(self, file: ImageFile) -> bool:
        """False, for nothing was written; DataError unless what has the name is this picture."""
        if not self._is_free(file.name, file.content):
            raise DataError(f"{self._path / file.name} has become something else meanwhile, such as a folder")
        return False

    def _is_free(self, name: str, content: bytes) -> bool:
        """Whether nothing has the name, or exactly this picture."""
        path = self._path / name
        try:
            status = path.lstat()
            same = stat.S_ISREG(status.st_mode) and status.st_size == len(content)
            return same and path.read_bytes() == content
        except FileNotFoundError:
            return True
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _place(temporary: Path, path: Path) -> None:
    """Give the file its name, if nothing has it; some file systems have no hard links, which do so in one step."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if not os.path.lexists(path):
            os.rename(temporary, path)


def encoded(content: bytes, form: ImageForm) -> bytes:
    """The image in this form; DataError for one that cannot be unpacked."""
    if form is ImageForm.keep or file_ending(content) == {"jpeg": "jpg"}.get(form.value, form.value):
        return content
    import numpy as np
    from PIL import Image, ImageOps

    held = io.BytesIO()
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:  # read from its head; nothing is unpacked yet
                raise DataError(f"{image.width}x{image.height} pixels are too many")
            picture = ImageOps.exif_transpose(image)  # the note that it lies on its side is not written again
            if form is ImageForm.png:
                picture.save(held, "PNG")
                return held.getvalue()
            if picture.mode.startswith(("I", "F")):  # 16 bits a pixel, which a conversion would clip to white
                picture = Image.fromarray(np.clip(np.asarray(picture, np.float64) / 256, 0, 255).astype(np.uint8))
            clear = picture.convert("RGBA")
            white = Image.new("RGBA", clear.size, "white")
            Image.alpha_composite(white, clear).convert("RGB").save(held, "JPEG", quality=QUALITY)
    except DataError:
        raise
    except Exception as error:  # a stranger's bytes: its decoders raise whatever they stumble over
        raise DataError(f"the image cannot be unpacked: {error}") from error
    return held.getvalue()

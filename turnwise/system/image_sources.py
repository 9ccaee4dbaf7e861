"""The content of an image by its source: a data URL, a file, or a member of a tar. The one reader for all rooms.

A member is written `images.tar!/photos/27.png`. Tars are read where they lie: an index of the plain files in one is
made once, links and names that lead out of it are not in it, and nothing is unpacked. Addresses are never fetched.
"""

import base64
import binascii
import io
import os
import re
import stat
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

from turnwise.errors import DataError
from turnwise.errors.nearest_name import nearest
from turnwise.system.image_bytes import ENDINGS, KINDS, media_type

MOST_BYTES = 64 << 20
"""Of one encoded image."""
MOST_MEMBERS = 10_000_000
MARK = "!/"
"""Between a tar and the name of its member."""
_TARS_KEPT = 256
_SHOWN = 80
_UNREAD = re.compile(rf"data:image/[a-z]+,(images/[0-9a-f]{{32}}\.({'|'.join(ENDINGS)}))", re.ASCII)
_FILE_NAME = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,100}")


def read_image(source: str, most: int = MOST_BYTES) -> bytes:
    """The encoded image; DataError, on one line, for what is none, is too large or cannot be had."""
    content = read_source(source, most)
    if media_type(content) is None:
        raise DataError(f"the image {_shown(source)} is not a {KINDS} image")
    return content


def read_source(source: str, most: int = MOST_BYTES) -> bytes:
    """The content, whatever it is; DataError for what is too large or cannot be had."""
    label = kept_name(source) or _shown(source)
    try:
        content = _read(source, most)
    except (OSError, ValueError) as error:  # ValueError: no base64, or a null character in a path
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"the image {label} cannot be read: {reason}") from error
    if len(content) > most:
        raise DataError(f"the image {label} has more than {most / 2**20:g} MiB")
    return content


@contextmanager
def open_source(source: str, most: int = MOST_BYTES) -> Iterator[BinaryIO]:
    """The content as a file, for who needs its head only; DataError for what cannot be had."""
    path = Path(source.removeprefix("file://"))
    if is_inline(source) or source.startswith(("http:", "https:")) or not os.path.isfile(path):
        with io.BytesIO(read_source(source, most)) as content:
            yield content
        return
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"the image {_shown(source)} cannot be read: {error.strerror or error}") from error


def member_of(source: str) -> tuple[Path, str] | None:
    """(the tar, the member) that a source names; None for any other."""
    if source.startswith(("data:", "http:", "https:")):
        return None
    tar, mark, name = source.partition(MARK)
    return (Path(tar), name) if mark and tar.endswith(".tar") else None


def is_inline(source: str) -> bool:
    """Whether the image stands in the source itself."""
    return source.startswith("data:")


def unread(name: str) -> str:
    """A source that only names the copy of an inline image that a run keeps: `data:image/png,images/5d41....png`.

    It is the sender's word for no file of ours: nothing reads it but who knows the run (storage/images/reader.py).
    """
    kind = name.rpartition(".")[2]
    return f"data:image/{'jpeg' if kind == 'jpg' else kind},{name}"


def kept_name(source: str) -> str | None:
    """The name in such a source; None for any other."""
    match = _UNREAD.fullmatch(source) if source.startswith("data:image/") and len(source) < _SHOWN else None
    return match and match[1]


def is_file_name(name: object) -> bool:
    """Whether it is a plain name of a file, which leads nowhere else."""
    return isinstance(name, str) and bool(_FILE_NAME.fullmatch(name)) and not name.startswith(".")


def members(tar: Path) -> dict[str, tuple[int, int]]:
    """Where each plain file of a tar begins and how long it is, by a name without `./` and `..`."""
    status = tar.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{tar}: is not a regular file")
    stamp = (status.st_mtime_ns, status.st_size)
    with _lock:
        index = _indexes.get(tar)
        if index is None or index.stamp != stamp:
            _indexes.pop(tar, None)
            while len(_indexes) >= _TARS_KEPT:
                del _indexes[next(iter(_indexes))]
            index = _indexes[tar] = _Index(stamp, _indexed(tar, status.st_size))
    return index.places


def _shown(source: str) -> str:
    if len(source) <= _SHOWN:
        return source
    return f"{source[:_SHOWN]}..." if source.startswith("data:") else f"...{source[-_SHOWN:]}"


@dataclass(frozen=True, slots=True)
class _Index:
    stamp: tuple[int, int]
    places: dict[str, tuple[int, int]]


_lock = threading.Lock()
_indexes: dict[Path, _Index] = {}


def _read(source: str, most: int) -> bytes:
    if kept_name(source) is not None:
        raise ValueError("the copy that its run kept is gone or damaged")
    if is_inline(source):
        head, _, data = source.partition(",")
        if len(data) > 4 * most:
            raise ValueError("it is too large")
        return base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
    if source.startswith(("http:", "https:")):
        raise ValueError("it is an address, and nothing is fetched")
    if (member := member_of(source)) is not None and not Path(source).is_file():
        return _member(*member, most)
    path = Path(source.removeprefix("file://"))
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would hold us
        raise ValueError("it is not a regular file")
    if status.st_size > most:
        raise ValueError(f"it has more than {most / 2**20:g} MiB")
    return path.read_bytes()


def _member(tar: Path, name: str, most: int) -> bytes:
    places = members(tar)
    if name not in places:
        raise DataError(f"{tar} has no file {name[:_SHOWN]!r}: {nearest(name, list(places)[:1000])}")
    start, size = places[name]
    if size > most:
        raise ValueError(f"it has more than {most / 2**20:g} MiB")
    descriptor = os.open(tar, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, size, start)
    finally:
        os.close(descriptor)


def _indexed(path: Path, size: int) -> dict[str, tuple[int, int]]:
    files: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for number, member in enumerate(tar):
                tar.members = []  # type: ignore[attr-defined]  # it keeps them all otherwise
                if number >= MOST_MEMBERS:
                    raise DataError(f"{path}: more than {MOST_MEMBERS} members")
                name = _plain_name(member.name)
                if not member.isreg() or member.issparse() or name is None:
                    continue
                if member.size < 0 or member.offset_data + member.size > size:  # a negative one leads back
                    raise DataError(f"{path}: the file ends within {name[:_SHOWN]!r}")
                files[name] = (member.offset_data, member.size)
    except (tarfile.TarError, EOFError, ValueError, binascii.Error) as error:
        packed = " (a packed one is unpacked first: gunzip)" if path.name.endswith(("gz", "xz", "bz2", "zst")) else ""
        raise DataError(f"{path}: not a readable tar{packed}: {error}") from error
    return files


def _plain_name(name: str) -> str | None:
    """The name without `./`; None for one that leads elsewhere."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return None if name.startswith("/") or ".." in parts or "\0" in name else "/".join(parts) or None

"""Files that appear complete or not at all."""

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from turnwise.errors import StorageError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` only when the block ends well.

    It is written beside its final place, so that the renaming is one step, and flushed to the disk before it. Whatever
    goes wrong leaves no file behind and an earlier file of that name as it was.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise cannot("write", path, error) from error
    finally:
        with contextlib.suppress(OSError):  # after success it is gone; otherwise the error above is the one to tell
            temporary.unlink()


def check_place(path: Path, key: str) -> None:
    """Refuse a place where no file can be written, before the work that would end with writing it."""
    try:
        if path.is_dir():
            raise StorageError(f"{key}={path}: that is a folder; name a file in it")
        check_folder(path.parent, key)
    except (OSError, ValueError) as error:
        raise StorageError(f"{key}={path}: {getattr(error, 'strerror', None) or error}") from error


def check_folder(path: Path, key: str) -> None:
    """Refuse a folder that cannot be made or written to."""
    try:
        there = next(
            candidate for candidate in (path.absolute(), *path.absolute().parents) if os.path.lexists(candidate)
        )
        os.rmdir(tempfile.mkdtemp(dir=there))  # tried: what is allowed does not say what works
    except NotADirectoryError as error:
        raise StorageError(f"{key}={path}: {there} is not a folder") from error
    except (OSError, ValueError) as error:
        raise StorageError(f"{key}={path}: {getattr(error, 'strerror', None) or error}") from error


def check_regular(path: Path) -> None:
    """OSError for what is there and is no file: opening a pipe that somebody left in a run would wait for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(None, "it is not a regular file")


def cannot(verb: str, path: Path, error: OSError) -> StorageError:
    """`cannot write runs/a/plan.txt: No space left on device`."""
    return StorageError(f"cannot {verb} {path}: {error.strerror or error}")


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

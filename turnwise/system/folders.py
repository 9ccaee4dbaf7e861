"""Temporary folders that nobody leaves behind: removed by their owner or, if that was killed, by the next one of the
kind."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "lock"


class OwnFolder:
    """A temporary folder, locked as long as its owner lives, whichever container that is in: a process's number would
    mean another process there."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """In `parent`, which other processes sweep too; None is the system's folder for temporary files."""
        folder = Path(tempfile.gettempdir()) if parent is None else parent
        sweep(prefix, folder)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # a disk without locks: then nobody can take it for a dead one's either
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / _LOCK).exists():
                return
            os.close(self._lock)  # somebody took it for a dead one's before it was locked

    def remove(self) -> None:
        """With everything in it; untrusted code may have left anything, but only below its own folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(prefix: str, parent: Path) -> None:
    """Remove the folders of those who could not: the kernel frees a dead owner's lock."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # somebody else's, being made, or swept by another
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)

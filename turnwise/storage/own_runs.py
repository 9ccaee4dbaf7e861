"""Which runs this user made here: remembered outside of them, where nothing that somebody sends can say it.

A run is one's own while it lies where it was made, has the config that it was made with, and is used from the same
folder, in which its config may name files. Then its config says nothing that this user has not said.
"""

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from turnwise.errors import StorageError
from turnwise.storage.run_dir import CONFIG, RunDir

MOST = 5000
"""Runs that are remembered, the latest."""


def remember(run: RunDir) -> None:
    """Note that this user has written the run's config. Without a home to write to, the run is like any other."""
    with suppress(OSError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / _mark(run)).touch(mode=0o600)
        marks = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in marks[:-MOST]:
            path.unlink()


def is_own(run: RunDir) -> bool:
    """Whether the run, as it lies here, is one that this user has made here."""
    try:
        folder = _folder()
        return _is_mine(folder.lstat(), stat.S_IFDIR) and _is_mine((folder / _mark(run)).lstat(), stat.S_IFREG)
    except (OSError, StorageError):  # no such mark, or no such run
        return False


def _is_mine(entry: os.stat_result, kind: int) -> bool:
    """Whether nobody else can have written it."""
    return stat.S_IFMT(entry.st_mode) == kind and entry.st_uid == os.getuid() and not entry.st_mode & 0o022


def _folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "turnwise" / "own_runs"


def _mark(run: RunDir) -> str:
    told = [str(run.path.resolve()), str(Path.cwd()), run.read_text(CONFIG)]
    return hashlib.sha256("\0".join(told).encode("utf-8", "surrogateescape")).hexdigest()

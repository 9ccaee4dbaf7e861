"""What a run's trajectory files say, newest first and in slices of time: by index.jsonl, else by the files."""

import math
import os
import time
from collections.abc import Iterator

from turnwise.errors import StorageError
from turnwise.ext.board.columns import shard_name
from turnwise.storage.file_tail import FileTail, Line
from turnwise.storage.index import INDEX, Shard, parse_line, shard_of
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.system.files import cannot

FOLDERS = ("trajectories", "eval")
SETTLING = 3.0
"""A writer adds a file's line after the file; for so many seconds it is waited for rather than the file read."""
_LONGEST_LINE = 256 << 20

Stamp = tuple[int, int]
"""(time of the last change in ns, size) of a file."""


class Feed:
    """Reads a run's shards once each; a later line about a file, or a new version of the file, is read again."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._tail = FileTail(run.path / INDEX)
        self._unread: list[Line] = []
        self._line_of: dict[str, int] = {}
        self._files: dict[str, Stamp] = {}
        self._read_files: dict[str, Stamp] = {}
        self._folders: dict[str, int] = {}
        self._damaged: dict[str, str] = {}
        self._bad_lines: dict[int, str] = {}

    def poll(self) -> bool:
        """See what is new; True when everything read before is void."""
        try:
            void, new = self._tail.poll()
            self._unread = new if void else self._unread + new
            if void:
                self._line_of, self._read_files, self._damaged, self._bad_lines = {}, {}, {}, {}
            for folder in FOLDERS:
                self._scan(folder)
        except OSError as error:
            raise cannot("read", self._run.path, error) from error
        return void

    @property
    def pending(self) -> int:
        """How many lines and files are still to be read."""
        return len(self._unread) + len(self._waiting())

    @property
    def damaged(self) -> list[dict[str, str]]:
        """What could not be read, with the reason."""
        lines = [{"file": INDEX, "reason": reason} for reason in self._bad_lines.values()]
        return lines + [{"file": file, "reason": reason} for file, reason in sorted(self._damaged.items())]

    def shards(self, seconds: float | None) -> Iterator[Shard]:
        """Shards not given before, newest first, until the time is up; at least one when there is one."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        had_lines = bool(self._unread)
        yield from self.from_lines(end)
        if not self._unread and (not had_lines or time.monotonic() < end):
            yield from self._from_files(end)

    def from_lines(self, end: float = math.inf) -> Iterator[Shard]:
        """Those that the index has lines about, the last line first."""
        while self._unread:
            shard = self._next_line()
            if shard is not None:
                yield shard
            if time.monotonic() >= end:
                return

    def _from_files(self, end: float) -> Iterator[Shard]:
        now = time.time()
        for file in sorted(self._waiting(), key=_newest_first, reverse=True):
            if self._line_of and abs(now - self._files[file][0] / 1e9) < SETTLING:
                continue
            shard = self.shard_from_file(file)
            if shard is not None:
                yield shard
            if time.monotonic() >= end:
                return

    def shard_from_file(self, file: str) -> Shard | None:
        """A shard read from its trajectories; None when it is no known file or cannot be read."""
        stamp = self._files.get(file)
        if stamp is None:
            return None
        self._read_files[file] = stamp
        self._damaged.pop(file, None)
        try:
            return shard_of(file, read_trajectories(self._run.path / file, unread=True))
        except (StorageError, TypeError, ValueError) as error:  # another writer's values may make no sense
            self._damaged[file] = str(error)
            return None

    def is_waiting(self, file: str) -> bool:
        """Whether a file is there that has no line and was not read."""
        return file in self._waiting()

    def forget(self, file: str, reason: str) -> None:
        """Count a shard whose values make no sense as damaged; if it came from a line, its file is read instead."""
        self._damaged[file] = reason
        self._line_of.pop(file, None)

    def _next_line(self) -> Shard | None:
        line = self._unread.pop()
        if line.size > _LONGEST_LINE:
            self._bad_lines[line.start] = f"a line of {line.size >> 20} MB is too long"
            return None
        try:
            shard = parse_line(next(self._tail.read([line])))
        except (StorageError, OSError) as error:
            self._bad_lines[line.start] = str(error)
            return None
        if line.start < self._line_of.get(shard.file, -1):
            return None  # a later line about this file was read already
        self._line_of[shard.file] = line.start
        self._damaged.pop(shard.file, None)
        return shard

    def _waiting(self) -> list[str]:
        """Files without a line that were not read yet, or changed since."""
        return [
            file
            for file, stamp in self._files.items()
            if file not in self._line_of and self._read_files.get(file) != stamp
        ]

    def _scan(self, folder: str) -> None:
        path = self._run.path / folder
        try:
            changed = path.stat().st_mtime_ns
        except FileNotFoundError:
            changed = -1
        again = [file for file in self._damaged if file.startswith(f"{folder}/")]  # one may have been half copied
        if changed == self._folders.get(folder) and not again:
            return
        self._folders[folder] = changed
        stamps = {}
        with os.scandir(path) if changed >= 0 else _nothing() as entries:
            for entry in entries:
                file = f"{folder}/{entry.name}"
                if shard_name(file) is not None and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    stamps[file] = (status.st_mtime_ns, status.st_size)
        self._files = {file: stamp for file, stamp in self._files.items() if not file.startswith(f"{folder}/")} | stamps


class _nothing:
    """A folder that is not there, as `os.scandir` would show it."""

    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        return iter(())

    def __exit__(self, *_: object) -> None:
        pass


def _newest_first(file: str) -> tuple[int, str]:
    digits = "".join(character for character in file.rpartition("step_")[2] if character.isdigit())
    return int(digits or 0), file

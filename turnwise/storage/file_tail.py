"""Reading files that another process writes: the new whole lines of one that grows, and the end of a text."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 1 << 20
_HEAD, _TAIL = 1024, 256
"""Bytes that are compared to know a file again: lines of one run often end alike."""


@dataclass(frozen=True, slots=True)
class Line:
    """Where a line stands, its newline included."""

    start: int
    size: int


class FileTail:
    """The whole lines of a growing file, each found once: `replaced, lines = tail.poll()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = -1
        self._forget()

    def _forget(self) -> None:
        self._end, self._head, self._tail = 0, b"", b""

    def poll(self) -> tuple[bool, list[Line]]:
        """Whether the file is another than before, so that all it said is void, and the lines that are new.

        Empty lines are left out, and a last line without its end waits for a later poll. A file that is not there has
        no lines.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                replaced = self._end > 0 and not self._is_same(file.fileno(), status)
                if replaced:
                    self._forget()
                self._inode = status.st_ino
                self._head = self._head or os.pread(file.fileno(), _HEAD, 0)
                if status.st_size <= self._end:
                    return replaced, []
                file.seek(self._end)
                return replaced, self._find(iter(lambda: file.read(_CHUNK), b""))
        except FileNotFoundError:
            replaced = self._end > 0
            self._forget()
            return replaced, []

    def read(self, lines: Sequence[Line]) -> Iterator[bytes]:
        """Reads the bytes of these lines from the file, one after the other."""
        if not lines:
            return
        with self.path.open("rb") as file:
            for line in lines:
                file.seek(line.start)
                yield file.read(line.size)

    def _is_same(self, descriptor: int, status: os.stat_result) -> bool:
        if status.st_ino != self._inode or status.st_size < self._end:
            return False
        tail = os.pread(descriptor, len(self._tail), self._end - len(self._tail))
        return tail == self._tail and os.pread(descriptor, len(self._head), 0) == self._head

    def _find(self, chunks: Iterator[bytes]) -> list[Line]:
        lines = []
        start = position = self._end
        recent = self._tail
        for chunk in chunks:
            at = 0
            while (newline := chunk.find(b"\n", at)) >= 0:
                end = position + newline + 1
                if end - start > 1:
                    lines.append(Line(start, end - start))
                start, at = end, newline + 1
            if at:
                self._end, self._tail = start, (recent + chunk[:at])[-_TAIL:]
            recent = (recent + chunk)[-_TAIL:]
            position += len(chunk)
        return lines


def end_of_text(path: Path, size: int) -> str:
    """The last so many bytes of a text, from a whole line on; nothing for a file that is not there."""
    try:
        with path.open("rb") as file:
            start = max(os.fstat(file.fileno()).st_size - size, 0)
            file.seek(start)
            text = file.read(size)
    except FileNotFoundError:
        return ""
    if start:  # the first line, or even its first letter, is cut
        text = text[text.find(b"\n") + 1 :]
    return text.decode("utf-8", "replace")

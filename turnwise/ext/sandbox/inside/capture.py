"""What a call prints: the first and the last characters, with a bounded memory whatever is printed."""

import builtins
import codecs
import io
from collections.abc import Iterable
from os import SEEK_CUR, SEEK_SET, fstat, lseek, pread
from stat import S_ISREG
from typing import Any

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

PIECE = 65536


def printable(text: str) -> str:
    """Lone surrogates written out, so that the text can be encoded."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def joined(head: str, tail: str, left_out: int) -> str:
    """The two ends of a text, with a notice where something is missing."""
    if not left_out:
        return head + tail
    gap = "" if not head or head.endswith("\n") else "\n"
    return f"{head}{gap}[{left_out} characters left out]\n{tail}"


def cut(text: str, cap: int) -> str:
    """At most `cap` characters of a text, its beginning and its end, and a notice of what is missing."""
    if len(text) <= cap:
        return text if text.isascii() else printable(text)
    first = cap // 2
    return joined(printable(text[:first]), printable(text[len(text) - (cap - first) :]), len(text) - cap)


class HeadTail:
    """Text that was written piece by piece, of which at most `cap` characters are kept."""

    __slots__ = ("_head", "_head_room", "_kept", "_tail", "_tail_cap", "_total", "cap")

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._tail_cap = cap - cap // 2
        self.clear()

    def clear(self) -> None:
        """Drops all text that was written."""
        self._head: list[str] = []
        self._head_room = self.cap // 2
        self._tail: list[str] = []
        self._kept = 0
        self._total = 0

    def write(self, text: str) -> None:
        """Adds a piece of text of any length."""
        if text.isascii():
            self._add(text)
            return
        for start in range(0, len(text), PIECE):
            self._add(printable(text[start : start + PIECE]))

    def _add(self, text: str) -> None:
        size = len(text)
        self._total += size
        room = self._head_room
        if room:
            if size <= room:
                self._head.append(text)
                self._head_room = room - size
                return
            self._head.append(text[:room])
            self._head_room = 0
            text = text[room:] if size - room <= self._tail_cap else text[size - self._tail_cap :]
        elif size > self._tail_cap:
            text = text[size - self._tail_cap :]
        self._tail.append(text)
        self._kept += len(text)
        # Many tiny pieces cost more than their characters, so the list is joined now and then.
        if self._kept > 2 * self._tail_cap or len(self._tail) > PIECE:
            last = "".join(self._tail)[-self._tail_cap :] if self._tail_cap else ""
            self._tail = [last]
            self._kept = len(last)

    def text(self) -> str:
        """What is left, and a notice when something is missing."""
        tail = "".join(self._tail)
        head = "".join(self._head)
        if len(head) + len(tail) > self.cap:
            tail = tail[len(tail) - self._tail_cap :]
        return joined(head, tail, self._total - len(head) - len(tail))


class ByteStream(io.BufferedIOBase):
    """`sys.stdout.buffer`: bytes are decoded into the same text."""

    def __init__(self, sink: HeadTail, descriptor: int) -> None:
        self._sink = sink
        self.descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE):
            self._sink.write(self._decoder.decode(bytes(view[start : start + PIECE])))
        return len(view)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor

    def close(self) -> None:
        """Stays open: the next call prints too."""


class TextStream(io.TextIOBase):
    """`sys.stdout` and `sys.stderr` of a session."""

    encoding = "utf-8"
    errors = "backslashreplace"
    newlines = None
    line_buffering = False
    write_through = True
    mode = "w"

    def __init__(self, name: str, sink: HeadTail, descriptor: int) -> None:
        self.name = name
        self._sink = sink
        self.buffer = ByteStream(sink, descriptor)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._sink.write(text if type(text) is str else str.__str__(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.buffer.fileno()

    def reconfigure(self, **options: object) -> None:
        """Accepted and without effect: the text is taken as it is."""

    def close(self) -> None:
        """Stays open: the next call prints too."""


class RawOutput:
    """What C code wrote to the descriptors 1 and 2: a file of a fixed size, which is read after the call."""

    __slots__ = ("_size", "descriptor")

    def __init__(self, descriptor: int) -> None:
        """`descriptor` is a duplicate that shares its offset with the descriptors the code writes to."""
        status = fstat(descriptor)
        self.descriptor = descriptor
        self._size = status.st_size if S_ISREG(status.st_mode) else 0

    def drain(self, sink: HeadTail) -> bool:
        """Move what was written to the sink; whether the file was full, so that more may have been lost."""
        if not self._size:
            return False
        end = lseek(self.descriptor, 0, SEEK_CUR)
        if not end:
            return False
        lseek(self.descriptor, 0, SEEK_SET)
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        length = min(end, self._size)
        for start in range(0, length, PIECE):
            sink.write(decoder.decode(pread(self.descriptor, min(PIECE, length - start), start)))
        sink.write(decoder.decode(b"", final=True))
        return end >= self._size

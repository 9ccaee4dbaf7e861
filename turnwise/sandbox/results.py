"""What a call gives back: a status, texts, images with their provenance, and what it took."""

import enum
import io
from dataclasses import dataclass, field
from typing import Any


class Status(enum.StrEnum):
    """How a call ended."""

    OK = "ok"
    ERROR = "error"
    """An exception, or an exit status other than 0."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    DENIED = "denied"
    """The sandbox refused an operation and the code did not handle it."""
    KILLED = "killed"
    """The process ended: a crash, an exit, a broken protocol, or a limit that cannot be handled inside."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in the code: `Failure("ZeroDivisionError", "division by zero", 2, "1 / 0", ...)`."""

    kind: str
    message: str
    line: int | None
    """In the code of this call, from 1."""
    source: str | None
    """That line."""
    traceback: str
    """Frames of the code only."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on an image: `Step("crop", {"box": [0, 0, 10, 10]})`."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


Box = tuple[float, float, float, float]
"""Left, upper, right, lower."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an image came from, as the session reports it; nobody relies on it before it is `verified`."""

    source: str | None
    """The name of the input image; None when it was drawn, or made from an array."""
    box: Box | None
    """The part of the source it shows, while that is a rectangle of the source."""
    steps: tuple[Step, ...] = ()
    frame: Box | None = None
    """The same with what lies beyond the source's edges, where it shows nothing."""
    verified: bool = False
    """Whether the source and the box were compared with the pixels (provenance.py); steps are the session's word."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as raw pixels, in PIL's modes L, RGB or RGBA."""

    name: str
    """`show`, `figure`, `value`, or the name of the saved file."""
    mode: str
    size: tuple[int, int]
    pixels: bytes
    provenance: Provenance

    def png(self) -> bytes:
        """Encoded, for those who need a file."""
        from PIL import Image

        buffer = io.BytesIO()
        Image.frombytes(self.mode, self.size, self.pixels).save(buffer, "PNG")
        return buffer.getvalue()


CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}


@dataclass(frozen=True, slots=True)
class InputImage:
    """An image given to a session. The code gets a copy of its own.

    `data` is the content of an image file, which the code finds under `name`, or raw pixels when `mode` and `size` are
    given; those are a variable only.
    """

    name: str
    data: bytes
    mode: str | None = None
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One call. `kept` says whether the session's variables and files survived it."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    """repr of the last expression, unless it is None or an image."""
    images: tuple[Picture, ...] = ()
    failure: Failure | None = None
    notices: tuple[str, ...] = ()
    """What was cut or lost, in words for the reader of the output."""
    seconds: float = 0.0
    """Wall time on the host's clock, without waiting for a free slot."""
    peak_memory: int = 0
    """Bytes resident at most, as the session reports it; 0 when it could not."""
    kept: bool = True

    def text(self) -> str:
        """Everything there is to read, in the order in which it happened."""
        parts = [self.stdout, self.stderr, self.value or ""]
        if self.failure is not None:
            parts.append(self.failure.traceback)
        parts += [f"[{notice}]" for notice in self.notices]
        return "\n".join(part.rstrip("\n") for part in parts if part)

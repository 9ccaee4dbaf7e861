"""What a call gives back: a status, texts, images with their provenance, and what it took. The only schema of it.

A session's frame is read into it by `replies.py`, a server's JSON by pydantic (`http_schemas.py`), which checks
what the annotations say; what the host makes itself is not checked.
"""

import base64
import binascii
import enum
import io
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from turnwise.data.images.provenance import OriginCheck

MAX_TEXT = 2_000_000
"""Characters of one text in a server's answer."""
MAX_STEPS = 64
MAX_NOTICES = 32
MAX_PICTURES = 64
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}


def clean(text: str) -> str:
    """Text that can be encoded, stored and tokenised: no lone surrogates, no NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}")


def encodable(text: str) -> str:
    """The text, if it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text that cannot be encoded") from error
    return text


def encode(data: bytes) -> str:
    """Base64, as it stands in JSON."""
    return base64.b64encode(data).decode("ascii")


def _decode(value: object) -> object:
    """Strict base64 as bytes; bytes stay what they are."""
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("not base64") from error


Base64 = Annotated[bytes, BeforeValidator(_decode), PlainSerializer(encode, when_used="json")]
Name = Annotated[str, AfterValidator(encodable), Field(max_length=1000)]
Text = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(clean)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Box = tuple[Finite, Finite, Finite, Finite]
"""Left, upper, right, lower."""
Affine = tuple[Finite, Finite, Finite, Finite, Finite, Finite]


class ExecutionStatus(enum.StrEnum):
    """How a call of the sandbox ended."""

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

    kind: Text
    message: Text
    line: int | None
    """In the code of this call, from 1."""
    source: Text | None
    """That line."""
    traceback: Text
    """Frames of the code only."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on an image: `Step("crop", {"box": [0, 0, 10, 10]})`."""

    name: Name
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an image came from, as the session reports it; nobody relies on it before it is `verified`."""

    source: Name | None
    """The name of the input image; None when it was drawn, or made from an array."""
    box: Box | None
    """The part of the source it shows, while that is a rectangle of the source."""
    steps: Annotated[tuple[Step, ...], Field(max_length=MAX_STEPS)] = ()
    frame: Box | None = None
    """The same with what lies beyond the source's edges, where it shows nothing."""
    origin: Annotated[OriginCheck, AfterValidator(lambda _: OriginCheck.UNVERIFIED), Field(exclude=True)] = (
        OriginCheck.UNVERIFIED
    )
    """What came of comparing the source and the box with the pixels (provenance.py); neither sent nor read. Steps are
    the session's word."""
    matrix: Annotated[Affine | None, AfterValidator(lambda _: None), Field(exclude=True)] = None
    """How the pixels of a verified image lie in its source, by the host's own finding; neither sent nor read."""
    source_size: Annotated[tuple[int, int] | None, AfterValidator(lambda _: None), Field(exclude=True)] = None
    """Of the source as the host decoded it; neither sent nor read."""

    @property
    def verified(self) -> bool:
        """Whether the host has seen that it is so."""
        return self.origin is OriginCheck.VERIFIED


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as raw pixels, in PIL's modes L, RGB or RGBA."""

    name: Name
    """`show`, `figure`, `value`, or the name of the saved file."""
    mode: Annotated[str, Field(pattern=r"\A(L|RGB|RGBA)\z")]
    size: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]]
    pixels: Annotated[Base64, Field(alias="data")]
    provenance: Provenance

    def png(self) -> bytes:
        """Encoded, for those who need a file."""
        from PIL import Image

        buffer = io.BytesIO()
        Image.frombytes(self.mode, self.size, self.pixels).save(buffer, "PNG")
        return buffer.getvalue()


def _fitting(picture: Picture) -> Picture:
    if len(picture.pixels) != picture.size[0] * picture.size[1] * CHANNELS[picture.mode]:
        raise ValueError("an image whose size does not fit")
    return picture


@dataclass(frozen=True, slots=True)
class InputImage:
    """An image given to a session. The code gets a copy of its own.

    `data` is the content of an image file, which the code finds under `name`, or raw pixels when `mode` and `size` are
    given; those are a variable only.
    """

    name: Name
    data: Base64
    mode: str | None = None
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One call. `kept` says whether the session's variables and files survived it."""

    status: ExecutionStatus
    stdout: Text = ""
    stderr: Text = ""
    value: Text | None = None
    """repr of the last expression, unless it is None or an image."""
    images: Annotated[tuple[Annotated[Picture, AfterValidator(_fitting)], ...], Field(max_length=MAX_PICTURES)] = ()
    failure: Failure | None = None
    notices: Annotated[tuple[Text, ...], Field(max_length=2 * MAX_NOTICES)] = ()
    """What was cut or lost, in words for the reader of the output."""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Wall time on the host's clock, without waiting for a free slot."""
    peak_memory: Annotated[int, Field(ge=0)] = 0
    """Bytes resident at most, as the session reports it; 0 when it could not."""
    kept: bool = True

    def text(self) -> str:
        """Everything there is to read, in the order in which it happened."""
        parts = [self.stdout, self.stderr, self.value or ""]
        if self.failure is not None:
            parts.append(self.failure.traceback)
        parts += [f"[{notice}]" for notice in self.notices]
        return "\n".join(part.rstrip("\n") for part in parts if part)

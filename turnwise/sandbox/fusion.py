"""Requests and answers over HTTP: SandboxFusion's, which other trainers send too, and those of our own sessions.

Both ends use them, and each believes only what passed here.
"""

import base64
import binascii
import enum
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from turnwise.choices import SandboxLevel
from turnwise.sandbox.replies import MAX_NOTICES, MAX_STEPS, clean
from turnwise.sandbox.results import CHANNELS, Failure, InputImage, Picture, Provenance, Result, Status, Step
from turnwise.sandbox.session import MAX_IMAGES_IN

MAX_TEXT = 2_000_000
"""Characters of one text in an answer."""
MAX_FILES = 256
MAX_CELLS = 1024


def _decode(value: object) -> object:
    """Strict base64 as bytes; bytes stay what they are."""
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("not base64") from error


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


Base64 = Annotated[bytes, BeforeValidator(_decode), PlainSerializer(encode, when_used="json")]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
NoSeconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Encodable = Annotated[str, AfterValidator(encodable)]
Name = Annotated[Encodable, Field(max_length=1000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class RunStatus(enum.StrEnum):
    """SandboxFusion's word on a whole request; SandboxError says nothing about the code."""

    Success = "Success"
    Failed = "Failed"
    SandboxError = "SandboxError"


class CommandStatus(enum.StrEnum):
    """SandboxFusion's word on one command."""

    Finished = "Finished"
    Error = "Error"
    TimeLimitExceeded = "TimeLimitExceeded"


class RunCodeRequest(BaseModel):
    """POST /run_code. `compile_timeout` means nothing for Python; unknown fields are ignored, as SandboxFusion does.

    `memory_limit_MB` can only lower the session's own limit.
    """

    code: str
    language: Annotated[str, Field(max_length=100)]
    stdin: Encodable | None = None
    compile_timeout: NoSeconds = 10
    run_timeout: Seconds = 10
    memory_limit_MB: int = -1
    files: Annotated[dict[Name, Base64 | None], Field(max_length=MAX_FILES)] = {}
    fetch_files: Annotated[list[Name], Field(max_length=MAX_FILES)] = []


class RunJupyterRequest(BaseModel):
    """POST /run_jupyter: cells of one notebook. A `cell_timeout` of 0 leaves only the total.

    SandboxFusion's `memory_limit_MB` is ignored, as it is there: the session's own limit holds.
    """

    cells: Annotated[list[str], Field(max_length=MAX_CELLS)]
    cell_timeout: NoSeconds = 0
    total_timeout: Seconds = 45
    kernel: Literal["python3"] = "python3"
    files: Annotated[dict[Name, Base64 | None], Field(max_length=MAX_FILES)] = {}
    fetch_files: Annotated[list[Name], Field(max_length=MAX_FILES)] = []


class CommandResult(BaseModel):
    """What one command did."""

    status: CommandStatus
    execution_time: Finite | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeAnswer(BaseModel):
    """The answer of /run_code."""

    status: RunStatus
    message: str = ""
    compile_result: CommandResult | None = None
    run_result: CommandResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, Base64] = {}


class CellResult(BaseModel):
    """What one cell did. `display` holds bundles by MIME type, `error` what Jupyter reports of an exception."""

    stdout: str = ""
    stderr: str = ""
    display: list[dict[str, Any]] = []
    error: list[dict[str, Any]] = []


class RunJupyterAnswer(BaseModel):
    """The answer of /run_jupyter."""

    status: RunStatus
    message: str = ""
    driver: CommandResult | None = None
    cells: list[CellResult] = []
    executor_pod_name: str | None = None
    files: dict[str, Base64] = {}


class ImageGiven(BaseModel):
    """An InputImage."""

    name: Name
    data: Base64
    mode: str | None = None
    size: tuple[int, int] | None = None

    def image(self) -> InputImage:
        return InputImage(self.name, self.data, self.mode, self.size)


class OpenRequest(BaseModel):
    """POST /sessions."""

    model_config = ConfigDict(extra="forbid")

    seed: int = 0
    stateless: bool = False
    images: Annotated[list[ImageGiven], Field(max_length=MAX_IMAGES_IN)] = []

    @classmethod
    def of(cls, seed: int, images: Sequence[InputImage], stateless: bool) -> "OpenRequest":
        given = [ImageGiven(name=one.name, data=one.data, mode=one.mode, size=one.size) for one in images]
        return cls(seed=seed, stateless=stateless, images=given)


class OpenAnswer(BaseModel):
    """The new session."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,200}$")]


class CallRequest(BaseModel):
    """POST /sessions/{id}/run. Without `seconds` the server's own limit holds."""

    model_config = ConfigDict(extra="forbid")

    code: str
    seconds: Seconds | None = None


class StepTold(BaseModel):
    """A Step."""

    name: Name
    arguments: dict[str, Any] = {}


class ProvenanceTold(BaseModel):
    """A Provenance."""

    source: Name | None = None
    box: tuple[Finite, Finite, Finite, Finite] | None = None
    frame: tuple[Finite, Finite, Finite, Finite] | None = None
    steps: Annotated[list[StepTold], Field(max_length=MAX_STEPS)] = []


class PictureTold(BaseModel):
    """A Picture, whose pixels are as many as it says."""

    name: Name
    mode: Literal["L", "RGB", "RGBA"]
    size: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]]
    data: Base64
    provenance: ProvenanceTold

    @model_validator(mode="after")
    def _fits(self) -> "PictureTold":
        if len(self.data) != self.size[0] * self.size[1] * CHANNELS[self.mode]:
            raise ValueError("an image whose size does not fit")
        return self

    def picture(self) -> Picture:
        found = self.provenance
        steps = tuple(Step(step.name, step.arguments) for step in found.steps)
        return Picture(
            self.name, self.mode, self.size, self.data, Provenance(found.source, found.box, steps, found.frame)
        )


class FailureTold(BaseModel):
    """A Failure."""

    kind: Name
    message: Text
    line: int | None
    source: Text | None
    traceback: Text

    def failure(self) -> Failure:
        source = None if self.source is None else clean(self.source)
        return Failure(clean(self.kind), clean(self.message), self.line, source, clean(self.traceback))


class ResultTold(BaseModel):
    """A Result, whole."""

    model_config = ConfigDict(from_attributes=True)

    status: Status
    stdout: Text
    stderr: Text
    value: Text | None
    images: Annotated[list[PictureTold], Field(max_length=MAX_IMAGES_IN)]
    failure: FailureTold | None
    notices: Annotated[list[Text], Field(max_length=2 * MAX_NOTICES)]
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    peak_memory: Annotated[int, Field(ge=0)]
    kept: bool

    @classmethod
    def of(cls, result: Result) -> "ResultTold":
        failure = result.failure
        return cls(
            status=result.status,
            stdout=result.stdout,
            stderr=result.stderr,
            value=result.value,
            images=[_told(picture) for picture in result.images],
            failure=None
            if failure is None
            else FailureTold(
                kind=failure.kind,
                message=failure.message,
                line=failure.line,
                source=failure.source,
                traceback=failure.traceback,
            ),
            notices=list(result.notices),
            seconds=result.seconds,
            peak_memory=result.peak_memory,
            kept=result.kept,
        )

    def result(self) -> Result:
        return Result(
            status=self.status,
            stdout=clean(self.stdout),
            stderr=clean(self.stderr),
            value=None if self.value is None else clean(self.value),
            images=tuple(image.picture() for image in self.images),
            failure=None if self.failure is None else self.failure.failure(),
            notices=tuple(clean(notice) for notice in self.notices),
            seconds=self.seconds,
            peak_memory=self.peak_memory,
            kept=self.kept,
        )


def _told(picture: Picture) -> PictureTold:
    origin = picture.provenance
    steps = [StepTold(name=step.name, arguments=step.arguments) for step in origin.steps]
    provenance = ProvenanceTold(source=origin.source, box=origin.box, frame=origin.frame, steps=steps)
    return PictureTold.model_construct(
        name=picture.name, mode=picture.mode, size=picture.size, data=picture.pixels, provenance=provenance
    )


class ReportAnswer(BaseModel):
    """GET /report: what the server proved when it started."""

    level: Literal["L0", "L2", "L3", "L4"]
    text: Text

    def proven(self) -> SandboxLevel:
        return SandboxLevel[self.level]

"""Requests and answers over HTTP: SandboxFusion's, which other trainers send too, and those of our own sessions.

Both ends use them, and each believes only what passed here.
"""

import enum
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, model_validator

from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.results import Base64, Finite, InputImage, Name, Result, Text, encodable
from turnwise.ext.sandbox.session import MAX_IMAGES_IN

MAX_FILES = 256
MAX_CELLS = 1024


Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
NoSeconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Encodable = Annotated[str, AfterValidator(encodable)]


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
    """How one command ended, and what it printed."""

    status: CommandStatus
    execution_time: Finite | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeAnswer(BaseModel):
    """The body that /run_code answers with."""

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
    """The body that /run_jupyter answers with."""

    status: RunStatus
    message: str = ""
    driver: CommandResult | None = None
    cells: list[CellResult] = []
    executor_pod_name: str | None = None
    files: dict[str, Base64] = {}


class OpenRequest(BaseModel):
    """The body of POST /sessions, which opens a session."""

    model_config = ConfigDict(extra="forbid")

    seed: int = 0
    stateless: bool = False
    images: Annotated[list[InputImage], Field(max_length=MAX_IMAGES_IN)] = []

    @classmethod
    def of(cls, seed: int, images: Sequence[InputImage], stateless: bool) -> "OpenRequest":
        return cls(seed=seed, stateless=stateless, images=list(images))


class OpenAnswer(BaseModel):
    """The answer to POST /sessions: the id of the new session."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,200}$")]


class CallRequest(BaseModel):
    """POST /sessions/{id}/run. Without `seconds` the server's own limit holds."""

    model_config = ConfigDict(extra="forbid")

    code: str
    seconds: Seconds | None = None


class ResultAnswer(RootModel[Result]):
    """A Result, whole: of one that lacks something nobody knows what it means."""

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        missing = [entry.name for entry in fields(Result) if isinstance(value, dict) and entry.name not in value]
        if missing:
            raise ValueError(f"a result without {missing[0]}")
        return value


class ReportAnswer(BaseModel):
    """GET /report: what the server proved when it started."""

    level: Literal["L0", "L2", "L3", "L4"]
    text: Text

    def proven(self) -> SandboxLevel:
        return SandboxLevel[self.level]

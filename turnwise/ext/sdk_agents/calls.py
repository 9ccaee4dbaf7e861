"""One call of a client and its reply, whichever dialect they came in; and the refusal of one that cannot be served."""

import contextlib
import enum
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json

from turnwise.types import Image, JsonSchema, Message, Part, Text, ToolCall

FULL = "context_length_exceeded"
"""The code by which SDKs know a full context."""
IMAGE_SOURCES = ("data:", "http://", "https://")
"""A path would have us read a file for whoever asks."""


class Refused(Exception):
    """An answer other than the one that was asked for; a client that tries again gets it again."""

    def __init__(self, text: str, *, status: int = 400, code: str = "unsupported") -> None:
        super().__init__(text)
        self.text, self.status, self.code = text, status, code

    @property
    def is_full(self) -> bool:
        """Whether the model's context, and nothing in the request, is why."""
        return self.code == FULL


class Finish(enum.Enum):
    """Why a reply of the model ends."""

    STOP = enum.auto()
    STOP_STRING = enum.auto()
    LENGTH = enum.auto()
    TOOL_CALLS = enum.auto()


@dataclass(frozen=True, slots=True)
class Call:
    """What a client asks: `Call("gpt", (Message(Role.USER, "6*7?"),))`."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[JsonSchema, ...] = ()
    strict: frozenset[str] = frozenset()
    """Tools of whose calls the client sees only those that fit the schema."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    hides_calls: bool = False
    """The client wants no tool call: what the policy writes of one is text to it."""
    ignored: tuple[str, ...] = ()
    """What the request asks for and does not get, where that leaves the tokens the policy's own."""


@dataclass(frozen=True, slots=True)
class ClientReply:
    """What it gets: the policy's message as a client sees it, without the tags of thoughts and calls."""

    text: str
    calls: tuple[ToolCall, ...]
    reasoning: str | None
    finish: Finish
    stop_string: str | None
    prompt_tokens: int
    completion_tokens: int
    tokens: list[tuple[str, float]] = field(default_factory=list)
    """The sampled tokens with their log-probabilities, where the call asks for them."""


class Border(BaseModel):
    """A part of a request. Values that say nothing (null, [] and {}) may stand under any name; SDKs send many."""

    model_config = ConfigDict(extra="forbid")
    ignores: ClassVar[frozenset[str]] = frozenset()
    """Names under which anything may stand: it is not read, which is said, and the tokens are the same without it."""

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        values = {key: value for key, value in data.items() if not (value is None or value in ([], {}))}
        unread = cls.unread(values)
        for name in sorted(unread - SAYS_NOTHING):
            note(name)
        return {key: value for key, value in values.items() if key not in unread}

    @classmethod
    def unread(cls, data: dict[str, Any]) -> frozenset[str]:
        """The names of this part that are not read."""
        return cls.ignores & data.keys()


_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)
OF_ANY_PART = frozenset({"cache_control", "citations", "annotations", "metadata", "provider_specific_fields"})
"""What SDKs hang on messages, parts, calls and tools for services that know it."""
SAYS_NOTHING = frozenset(
    {"user", "safety_identifier", "metadata", "store", "service_tier", "cache_control", "id"}
    | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "annotations", "citations"}
)
"""What asks for nothing that a model does: nobody needs to hear that it is not read."""


def note(text: str) -> None:
    """Say that something of the request under way is not done."""
    notes = _notes.get()
    if notes is not None and text not in notes:
        notes.append(text)


def note_other(name: str, requested: Any, usual: Any) -> None:
    """Say so of a value that is not the usual one."""
    if requested is not None and requested != usual:
        note(f"{name}={requested!r:.60}".replace("'", ""))


Request = TypeVar("Request", bound=Border)


def read_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise Refused("the body is not a JSON object", code="invalid_json")
    return value


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """What `note` is told while a request is read."""
    notes: list[str] = []
    before = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(before)


def validated(kind: type[Request], body: dict[str, Any]) -> Request:
    """A request of this kind; Refused with the place of what is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise Refused(reason_of(error)) from error


def reason_of(error: ValidationError) -> str:
    """The first thing that is wrong with a request; for a text that may also be a list, with what is in the list."""
    first = max(error.errors(include_url=False, include_input=False), key=lambda fault: len(fault["loc"]))
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith("list["))
    if first["type"] == "extra_forbidden":
        return f"{where}: this parameter is not supported here; leave it out"
    return f"{where}: {first['msg']}"


def image_of(url: str) -> Image:
    """An image that a client sends or links to."""
    if not url.startswith(IMAGE_SOURCES):
        raise Refused("an image is a data URL or a web address", code="invalid_image")
    return Image(url)


def content_of(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    """Parts as a message has them: a text where there is nothing else."""
    if any(isinstance(part, Image) for part in parts):
        return tuple(parts)
    return "".join(part.text for part in parts if isinstance(part, Text))


def read_call(call_id: str, name: str, arguments: str, where: str) -> ToolCall:
    """The call of a client's own words, with its arguments read."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"{where}: the arguments of {name!r} are not JSON: {error}", code="invalid_message") from error
    if not isinstance(value, dict):
        raise Refused(f"{where}: the arguments of {name!r} are not an object", code="invalid_message")
    return ToolCall(call_id, name, value)


def pieces(text: str, size: int = 32) -> list[str]:
    """A text in the pieces in which it is streamed."""
    return [text[start : start + size] for start in range(0, len(text), size)]

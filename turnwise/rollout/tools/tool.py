"""What a tool is: a typed function with a docstring becomes a schema, a validated call and a text for the model."""

import inspect
import json
import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

from pydantic import TypeAdapter, ValidationError

from turnwise.config import Config
from turnwise.errors import PluginError, ToolError
from turnwise.errors.nearest_name import unknown
from turnwise.rollout import plugin_calls
from turnwise.rollout.toolbox.schema import (
    BadArguments,
    check_schema,
    check_signature,
    find_context,
    read_signature,
)
from turnwise.types import JsonSchema, Message, Sample, ToolResult

if TYPE_CHECKING:
    from turnwise.rollout.sample_images import MadeImage

DEFAULT_TIMEOUT = 30.0
DEFAULT_CONCURRENCY = 64


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may know of the episode; a parameter annotated with it is filled in and hidden from the model.

    It is the episode's own copy: what a tool changes in it is not seen by siblings.
    """

    sample: Sample
    kwargs: dict[str, Any]
    """The row's `tools_kwargs` for this tool; of a class, `create_kwargs` and so on."""
    seed: int = 0
    """The episode's own; the same when it is played again."""
    messages: Sequence[Message] = ()
    """The conversation as it goes on, to be read only."""
    made: "Sequence[MadeImage]" = ()
    """The images that tools gave back in it so far, in the order they were shown; to be read only."""


class ToolSession(Protocol):
    """A tool at work in one episode."""

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Run once; raise ToolError for what the model should read."""
        ...

    async def close(self) -> None:
        """Called once on every path, cancellation included."""
        ...


@runtime_checkable
class RewardingSession(Protocol):
    """A session that says at the end of an episode what its use was worth."""

    async def calc_reward(self) -> float | None:
        """Asked once before `close` when the episode has not failed; recorded on the trajectory as `tool_rewards`."""
        ...


@runtime_checkable
class ReadsKwargs(Protocol):
    """A tool that knows which of a row's `tools_kwargs` it reads, so that a misspelt one is found before a run."""

    def kwargs_problem(self, kwargs: Mapping[str, Any]) -> str | None:
        """What it would not read; None when all is well."""
        ...


@runtime_checkable
class NeedsOfRows(Protocol):
    """A tool that only some rows can be played with."""

    def needs(self, sample: Sample) -> str | None:
        """What the sample lacks, such as "a repository: no column names one"; None when it can be played."""
        ...


@runtime_checkable
class MadeForRun(Protocol):
    """A tool that reads the run's config: where its code runs, and with which limits."""

    def for_run(self, config: Config) -> "Tool":
        """The run's own tool: it may have something to start and to stop."""
        ...


class Tool(Protocol):
    """A tool as the rollout sees it. `schema` is the OpenAI function schema, kept whole."""

    @property
    def name(self) -> str: ...
    @property
    def schema(self) -> JsonSchema: ...
    @property
    def timeout(self) -> float: ...
    @property
    def concurrency(self) -> int: ...

    async def open(self, context: ToolContext) -> ToolSession:
        """Opens a session of the tool for one episode."""
        ...


@runtime_checkable
class Configurable(Protocol):
    """A built-in tool that takes the `config` of its entry in a file of tools."""

    def configured(self, config: Mapping[str, Any], folder: Path) -> Tool:
        """The tool with these settings; files are named from `folder`. ConfigError for what is none."""
        ...


@runtime_checkable
class Service(Protocol):
    """To be started before the first episode and stopped after the last: a tool, or what tools name as `service`."""

    async def start(self) -> str:
        """Start it; what is worth knowing about it is returned for the run's log."""
        ...

    async def stop(self) -> None:
        """Ends the service; it is called on every path."""
        ...


@dataclass(slots=True)
class FunctionTool:
    """A tool made from a plain function; stateless."""

    name: str
    schema: JsonSchema
    function: Callable[..., Any]
    context_parameter: str | None
    timeout: float = DEFAULT_TIMEOUT
    concurrency: int = DEFAULT_CONCURRENCY
    readers: dict[str, TypeAdapter[Any]] | None = field(default=None, repr=False)
    """One per parameter; None when the schema was written by hand and arguments are passed as they come."""
    instant: bool = False
    """Ours, and it neither waits nor hangs: it needs no slot, and no task in which it could be stopped."""

    @property
    def reads_kwargs(self) -> bool:
        """Whether a row's `tools_kwargs` reach it; a tool that does not say so is given them."""
        return self.context_parameter is not None

    async def open(self, context: ToolContext) -> ToolSession:
        return _FunctionSession(self, context)

    async def run(self, arguments: dict[str, Any], context: ToolContext | None) -> ToolResult:
        """One call. `context` is needed when `context_parameter` names a parameter for it."""
        values = arguments if self.readers is None else read_arguments(self.name, self.readers, arguments)
        if self.context_parameter is not None:
            values = {**values, self.context_parameter: context}
        return as_result(await plugin_calls.call(self.function, **values))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The decorated function stays callable."""
        return self.function(*args, **kwargs)


@dataclass(slots=True)
class _FunctionSession:
    tool: FunctionTool
    context: ToolContext

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return await self.tool.run(arguments, self.context)

    async def close(self) -> None:
        return None


def read_arguments(name: str, readers: dict[str, TypeAdapter[Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the annotations promise them."""
    read = {}
    for key, value in arguments.items():
        if key not in readers:
            raise BadArguments(f"bad arguments for {name}: {unknown('parameter', key, readers)}")
        try:
            read[key] = readers[key].validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(step) for step in (key, *first["loc"]))
            raise BadArguments(f"bad arguments for {name}: {where}: {first['msg'][:300]}") from error
    return read


def as_result(value: Any) -> ToolResult:
    """A tool's return value as a result; what is not text or JSON is an error the model is told."""
    if isinstance(value, ToolResult):
        return _checked(value)
    if isinstance(value, str):
        return ToolResult(value)
    if isinstance(value, bool | int | float | list | dict):
        try:
            return ToolResult(json.dumps(value, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"the tool returned {type(value).__name__} that is not JSON: {error}") from error
    raise ToolError(f"the tool returned {type(value).__name__}, not text")


def _checked(result: ToolResult) -> ToolResult:
    """A result that can be shown, counted and stored."""
    if not isinstance(result.text, str):
        raise ToolError(f"the tool returned {type(result.text).__name__}, not text")
    score = as_number(result.score)
    if score is None and result.score is not None:
        raise ToolError(f"the tool returned {repr(result.score)[:80]} as its score; it must be a finite number")
    info = as_json(result.info)
    if not isinstance(info, dict):
        raise ToolError("the tool's info must be a dict of JSON values")
    return ToolResult(result.text, tuple(result.images), score, info)


def as_number(value: Any) -> float | None:
    """A finite number of any library as a float, else None."""
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_json(value: Any) -> Any:
    """A copy made of JSON values only, so that it can be stored and nobody changes it later; None when it cannot be."""
    try:
        return json.loads(json.dumps(value, default=_number))
    except (TypeError, ValueError, RecursionError):
        return None


def _number(value: Any) -> int | float:
    """Numbers of other libraries, such as numpy's."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    *,
    name: str | None = None,
    schema: JsonSchema | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    concurrency: int = DEFAULT_CONCURRENCY,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    schema: JsonSchema | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    concurrency: int = DEFAULT_CONCURRENCY,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a function: schema from signature and docstring, or given whole and kept as it is."""

    def make(target: Callable[..., Any]) -> FunctionTool:
        if not callable(target):
            raise PluginError(f"{reprlib.repr(target)} is not a tool: decorate a typed function with @tool")
        tool_name = name or getattr(target, "__name__", None) or type(target).__name__
        if any(test(target) for test in (inspect.isgeneratorfunction, inspect.isasyncgenfunction)):
            raise PluginError(f"tool {tool_name!r} is a generator: a tool must return its reply")
        if timeout <= 0 or concurrency < 1:
            raise PluginError(f"tool {tool_name!r}: timeout must be above 0 and concurrency at least 1")
        if schema is None:
            read = read_signature(target, tool_name, ToolContext)
            whole: JsonSchema = {"type": "function", "function": read.schema}
            check_schema(whole, tool_name)
            return FunctionTool(tool_name, whole, target, read.context, timeout, concurrency, read.readers)
        check_schema(schema, tool_name)
        if name is not None and name != schema["function"]["name"]:
            raise PluginError(f"tool {name!r}: its schema calls it {schema['function']['name']!r}")
        context = find_context(target, tool_name, ToolContext)
        check_signature(target, tool_name, context, schema)
        return FunctionTool(schema["function"]["name"], schema, target, context, timeout, concurrency)

    return make if function is None else make(function)

"""What a tool is: a typed function with a docstring becomes a schema, a validated call and a text for the model."""

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, get_type_hints, overload

import jsonschema
from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from turnwise.errors import PluginError, ToolError
from turnwise.types import JsonSchema, Sample, ToolResult

DEFAULT_TIMEOUT = 30.0
DEFAULT_CONCURRENCY = 64
MAX_STUCK_THREADS = 256


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may know of the episode; a parameter annotated with it is filled in and hidden from the model."""

    sample: Sample
    kwargs: dict[str, Any]
    """The row's `tools_kwargs` for this tool (in verl's form: `create_kwargs` and so on)."""


class ToolSession(Protocol):
    """A tool at work in one episode."""

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Run once; raise ToolError for what the model should read."""
        ...

    async def close(self) -> None:
        """Called once on every path, cancellation included."""
        ...


class Tool(Protocol):
    """A tool as the rollout sees it. `schema` is the OpenAI function schema, kept whole."""

    name: str
    schema: JsonSchema
    timeout: float
    concurrency: int

    async def open(self, context: ToolContext) -> ToolSession:
        """A session for one episode."""
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

    async def open(self, context: ToolContext) -> ToolSession:
        return _FunctionSession(self, context)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The decorated function stays callable."""
        return self.function(*args, **kwargs)


@dataclass(slots=True)
class _FunctionSession:
    tool: FunctionTool
    context: ToolContext

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        extra = {self.tool.context_parameter: self.context} if self.tool.context_parameter else {}
        if inspect.iscoroutinefunction(self.tool.function):
            value = await self.tool.function(**arguments, **extra)
        else:
            value = await _in_thread(lambda: self.tool.function(**arguments, **extra))
        return as_result(value)

    async def close(self) -> None:
        return None


def as_result(value: Any) -> ToolResult:
    """A tool's return value as a result; what is not text or JSON is an error the model is told."""
    if isinstance(value, ToolResult):
        if not isinstance(value.text, str):
            raise ToolError(f"the tool returned {type(value.text).__name__}, not text")
        return value
    if isinstance(value, str):
        return ToolResult(value)
    if isinstance(value, bool | int | float | list | dict):
        try:
            return ToolResult(json.dumps(value, ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise ToolError(f"the tool returned {type(value).__name__} that is not JSON: {error}") from error
    raise ToolError(f"the tool returned {type(value).__name__}, not text")


class _StuckThreads:
    """Threads of synchronous tools that outlived their timeout; too many of them end the run visibly."""

    count = 0


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Run blocking work in its own daemon thread.

    A shared pool would fill up with hung tools and then starve every other one.
    """
    if _StuckThreads.count >= MAX_STUCK_THREADS:
        raise PluginError(f"{MAX_STUCK_THREADS} synchronous tool calls hang; give the tool its own timeout")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            _StuckThreads.count -= 1
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def body() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:  # carried to the awaiting task, whatever it is
            error = RuntimeError(f"StopIteration: {raised}") if isinstance(raised, StopIteration) else raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=body, daemon=True, name="turnwise-tool").start()
    try:
        return await future
    except asyncio.CancelledError:
        _StuckThreads.count += 1
        raise


def validate(tool: Tool, arguments: dict[str, Any]) -> None:
    """Raise ToolError with a text the model can act on when arguments do not fit the schema."""
    schema = tool.schema["function"].get("parameters") or {"type": "object", "properties": {}}
    validator = jsonschema.Draft202012Validator(schema)
    errors = sorted(validator.iter_errors(arguments), key=lambda error: [str(step) for step in error.path])
    if errors:
        where = ".".join(str(step) for step in errors[0].path)
        raise ToolError(f"bad arguments for {tool.name}: {where + ': ' if where else ''}{errors[0].message[:300]}")


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
    """Make a tool of a function: schema from signature and docstring, or given whole as `schema`."""

    def make(target: Callable[..., Any]) -> FunctionTool:
        tool_name = name or target.__name__
        context, made = _read_signature(target, tool_name)
        whole: JsonSchema = {"type": "function", "function": made} if schema is None else schema
        if not isinstance(whole.get("function"), dict) or not isinstance(whole["function"].get("name"), str):
            raise PluginError(f"tool {tool_name!r}: a schema is {{'type': 'function', 'function': {{'name': ...}}}}")
        parameters = whole["function"].get("parameters") or {}
        try:
            jsonschema.Draft202012Validator.check_schema(parameters)
        except jsonschema.SchemaError as error:
            raise PluginError(f"tool {tool_name!r}: its parameters are not a JSON schema: {error.message}") from error
        return FunctionTool(whole["function"]["name"], whole, target, context, timeout, concurrency)

    return make if function is None else make(function)


def _read_signature(function: Callable[..., Any], name: str) -> tuple[str | None, JsonSchema]:
    """(the parameter that wants a ToolContext, the function schema)."""
    summary, described = _read_docstring(function)
    if not summary:
        raise PluginError(f"tool {name!r} needs a docstring: it is what the model reads")
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise PluginError(f"tool {name!r}: cannot resolve its annotations: {error}") from error
    context: str | None = None
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise PluginError(f"tool {name!r}: parameter {parameter.name!r} must be an ordinary named parameter")
        if parameter.name not in hints:
            raise PluginError(f"tool {name!r}: parameter {parameter.name!r} needs a type annotation")
        if hints[parameter.name] is ToolContext:
            context = parameter.name
            continue
        properties[parameter.name] = _property(name, parameter, hints[parameter.name], described)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return context, {"name": name, "description": summary, "parameters": parameters}


def _property(name: str, parameter: inspect.Parameter, hint: Any, described: dict[str, str]) -> JsonSchema:
    try:
        schema = dict(TypeAdapter(hint).json_schema())
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise PluginError(f"tool {name!r}: no JSON schema for {parameter.name!r}: {hint!r}") from error
    schema.pop("title", None)
    if parameter.name in described:
        schema["description"] = described[parameter.name]
    return schema


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """(the text before `Args:`, a description per parameter of a Google-style `Args:` block)."""
    text = inspect.getdoc(function) or ""
    head, _, rest = text.partition("\nArgs:\n")
    described: dict[str, str] = {}
    current = None
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        entry = re.match(r"\s{2,4}(\w+)(?: \([^)]*\))?: (.+)", line)
        if entry:
            current = entry.group(1)
            described[current] = entry.group(2).strip()
        elif current and line.strip():
            described[current] += " " + line.strip()
    return " ".join(head.split()), described

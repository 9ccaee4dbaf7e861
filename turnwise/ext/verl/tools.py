"""verl's tool classes and function tools as tools of ours: both lifecycles, both ways of passing a row's arguments.

They are known by what they have, not by their base class: it is the real verl's, or our stand-in's
(turnwise/ext/verl/stand_ins), or none.
"""

import contextlib
import inspect
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, ClassVar
from uuid import uuid4

from turnwise.config.choices import Lifecycle
from turnwise.errors import PluginError, ToolError, TurnwiseError, one_line
from turnwise.errors.nearest_name import unknown
from turnwise.ext.verl.adapters import REGISTRIES
from turnwise.rollout import plugin_calls
from turnwise.rollout.toolbox.schema import check_schema
from turnwise.rollout.tools.tool import (
    DEFAULT_CONCURRENCY,
    DEFAULT_TIMEOUT,
    ToolContext,
    ToolSession,
    as_json,
    as_number,
)
from turnwise.system.image_bytes import data_url
from turnwise.types import Image, JsonSchema, Message, ToolResult

_METHODS = ("create", "execute", "calc_reward", "release")
_SCHEMA_CLASS = "OpenAIFunctionToolSchema"
_SHARED = "verl_agent_data"
_of_loop: ContextVar[Any] = ContextVar("agent_data", default=None)


@contextlib.contextmanager
def agent_data_of_loop(agent_data: Any) -> Iterator[None]:
    """Tools that are called meanwhile are given this object as `agent_data`: a loop of verl's has its own."""
    before = _of_loop.set(agent_data)
    try:
        yield
    finally:
        _of_loop.reset(before)


def is_verl_tool(plugin: object) -> bool:
    """Whether this is a class written as verl's BaseTool is."""
    return isinstance(plugin, type) and all(callable(getattr(plugin, name, None)) for name in _METHODS)


def verl_tool(kind: type, config: Mapping[str, Any], schema: JsonSchema | None = None) -> "VerlTool":
    """A tool made of verl's class, its config and its schema; None takes the one the class itself gives."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not is_verl_tool(kind):
        missing = [method for method in _METHODS if not callable(getattr(kind, method, None))]
        raise PluginError(f"tool class {name} has no {', '.join(missing)}")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # verl's BaseTool prints its schema
            instance = kind(config=dict(config), tool_schema=_schema_object(kind, schema, name))
            whole = schema if schema is not None else _as_dict(instance.get_openai_tool_schema())
    except TurnwiseError:
        raise
    except Exception as error:  # a user's code, run before anything else: its author reads the message
        raise PluginError(f"tool class {name}: making it failed: {one_line(error)}") from error
    check_schema(whole, name)
    return VerlTool(str(whole["function"]["name"]), whole, instance)


def _schema_object(kind: type, schema: JsonSchema | None, name: str) -> Any:
    """The schema as the class's own verl has it; what that one drops the model is still told."""
    if schema is None:
        return None
    for base in kind.__mro__:
        reader = getattr(vars(base).get("__init__"), "__globals__", {}).get(_SCHEMA_CLASS)
        if reader is not None:
            try:
                return reader.model_validate(schema)
            except ValueError as error:
                raise PluginError(f"tool class {name}: verl's schema class refuses the tool_schema: {error}") from error
    return schema


def _as_dict(schema: Any) -> JsonSchema:
    if isinstance(schema, Mapping):
        return dict(schema)
    if not hasattr(schema, "model_dump"):
        raise PluginError(f"get_openai_tool_schema returned {schema!r:.80}, not a schema")
    dumped: JsonSchema = schema.model_dump(exclude_unset=True, exclude_none=True)
    return dumped


@dataclass(slots=True)
class VerlTool:
    """One object of verl's class, which serves all episodes of a run."""

    name: str
    schema: JsonSchema
    made: Any = field(repr=False)
    lifecycle: Lifecycle = Lifecycle.per_call
    timeout: float = DEFAULT_TIMEOUT
    concurrency: int = DEFAULT_CONCURRENCY

    def with_lifecycle(self, lifecycle: Lifecycle) -> "VerlTool":
        """The same object with another one."""
        return replace(self, lifecycle=lifecycle)

    @property
    def per_trajectory(self) -> bool:
        return self.lifecycle is Lifecycle.per_trajectory

    def kwargs_problem(self, kwargs: Mapping[str, Any]) -> str | None:
        """A key of a row's tools_kwargs that no method is given; which names it reads only the class knows."""
        valid = [f"{method}_kwargs" for method in _METHODS]
        return next((unknown("key", key, valid) for key in kwargs if key not in valid), None)

    async def open(self, context: ToolContext) -> ToolSession:
        session = _Session(self, context)
        if self.per_trajectory:
            await session.begin()
        return session


@dataclass(slots=True)
class _Session:
    """The tool in one episode. `per_call` creates and releases around each call, as verl's agent loops do; otherwise
    once, as its SGLang engine did, and then `calc_reward` is asked at the end."""

    tool: VerlTool
    context: ToolContext
    instance_id: str | None = None
    greeting: str = ""
    """What `create` wanted the model to read: it comes before the first reply."""

    async def begin(self) -> None:
        self.instance_id, self.greeting = await self._create(uuid4().hex)

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        if self.tool.per_trajectory:
            result = await self._execute(str(self.instance_id), arguments)
            greeting, self.greeting = self.greeting, ""
            text = f"{greeting}\n{result.text}" if greeting else result.text
            return ToolResult(text, result.images, result.score, result.info)
        instance_id, _ = await self._create(None)
        try:
            return await self._execute(instance_id, arguments)
        finally:
            await self._run("release", instance_id, kwargs=self._kwargs("release_kwargs"))

    async def calc_reward(self) -> float | None:
        """What the instance of a whole episode was worth; verl asks no other."""
        if self.instance_id is None:
            return None
        value = await self._run("calc_reward", self.instance_id, kwargs=self._kwargs("calc_reward_kwargs"))
        score = as_number(value)
        if score is None and value is not None:
            raise ToolError(f"calc_reward returned {value!r:.80}; it must be a finite number")
        return score

    async def close(self) -> None:
        if self.instance_id is not None:
            await self._run("release", self.instance_id, kwargs=self._kwargs("release_kwargs"))

    async def _create(self, instance_id: str | None) -> tuple[str, str]:
        """(the instance's id, what the model should read of it); the row's arguments go nested and, where the
        signature names them or the lifecycle is that of the SGLang engine, flat as well."""
        arguments = self._kwargs("create_kwargs")
        takes = _Takes.of(self.tool.made.create)
        flat = (
            arguments
            if self.tool.per_trajectory
            else {name: arguments[name] for name in arguments if name in takes.names}
        )
        created = await self._run("create", *(() if instance_id is None else (instance_id,)),
                               kwargs={**flat, "create_kwargs": arguments})  # fmt: skip
        match created:
            case (str() as name, response):
                return name, getattr(response, "text", None) or ""
            case str() as name:
                return name, ""
        raise ToolError(f"create returned {created!r:.80}, not (instance id, ToolResponse)")

    async def _execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResult:
        sample = self.context.sample
        own = ToolAgentData(uuid4().hex, sample.tools_kwargs, self.context.messages)
        shared = sample.info.setdefault(_SHARED, own)
        kwargs = {**self._kwargs("execute_kwargs"), "agent_data": _of_loop.get() or shared}
        return as_verl_result(await self._run("execute", instance_id, arguments, kwargs=kwargs))

    async def _run(self, method: str, /, *args: Any, kwargs: dict[str, Any]) -> Any:
        function = getattr(self.tool.made, method)
        return await plugin_calls.call(function, *args, **_Takes.of(function).only(kwargs))

    def _kwargs(self, which: str) -> dict[str, Any]:
        arguments = self.context.kwargs.get(which)
        return dict(arguments) if isinstance(arguments, Mapping) else {}


class ToolAgentData:
    """What a tool of verl 0.7 and later is told of its episode: one object for all tools and calls of it.

    `extra_fields` and `metrics` are for the tools' own use; `messages` are a copy, made anew each time.
    """

    def __init__(self, request_id: str, tools_kwargs: dict[str, Any], messages: Sequence[Message]) -> None:
        self.request_id = request_id
        self.tools_kwargs = tools_kwargs
        self._messages = messages
        self.extra_fields: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, the message that made the call at its end."""
        return [_message(message) for message in self._messages]

    def __getattr__(self, name: str) -> Any:
        names = "messages, request_id, tools_kwargs, extra_fields and metrics"
        raise AttributeError(f"agent_data has no {name!r} here: it has {names}")


def _message(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role.value, "content": message.text}
    if message.tool_calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        entry["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return entry


@dataclass(frozen=True, slots=True)
class _Takes:
    """Which keyword arguments a method can be given."""

    names: frozenset[str]
    any_name: bool

    @classmethod
    def of(cls, method: Callable[..., Any]) -> "_Takes":
        parameters = inspect.signature(method).parameters.values()
        named = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        return cls(named, any(p.kind is p.VAR_KEYWORD for p in parameters))

    def only(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs if self.any_name else {name: kwargs[name] for name in kwargs if name in self.names}


# --- function tools ------------------------------------------------------------------------------------------------


def function_tools(module: ModuleType) -> "list[VerlFunctionTool]":
    """The functions of a file that verl's @function_tool decorates, in their order."""
    entries = [entry for entry in _registered() if entry.fn.__module__ == module.__name__]
    return [_made_of(entry) for entry in entries]


def function_tool_of(function: object) -> "VerlFunctionTool | None":
    """The tool of a decorated function; None for one that is not."""
    for entry in _registered():
        if entry.fn is function:
            return _made_of(entry)
    return None


def _made_of(entry: Any) -> "VerlFunctionTool":
    return VerlFunctionTool(str(entry.name), _as_dict(entry.tool_schema), entry.fn)


def _registered() -> list[Any]:
    modules = [sys.modules[name] for name in REGISTRIES if name in sys.modules]
    return [entry for module in modules for entry in module.FUNCTION_TOOL_REGISTRY.values()]


@dataclass(slots=True)
class VerlFunctionTool:
    """A function with verl's @function_tool; it has no state and ignores the row's tools_kwargs, as in verl."""

    name: str
    schema: JsonSchema
    function: Callable[..., Any]
    timeout: float = DEFAULT_TIMEOUT
    concurrency: int = DEFAULT_CONCURRENCY

    reads_kwargs: ClassVar[bool] = False

    async def open(self, context: ToolContext) -> ToolSession:
        return _FunctionSession(self.function)


@dataclass(slots=True)
class _FunctionSession:
    function: Callable[..., Any]

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        returned = await plugin_calls.call(self.function, **arguments)
        if isinstance(returned, tuple) and not 1 <= len(returned) <= 3:
            raise TypeError(
                f"a function tool returns (response,), (response, reward) or with metrics, not {returned!r}"
            )
        return as_verl_result(returned)

    async def close(self) -> None:
        return None


# --- results -------------------------------------------------------------------------------------------------------


def as_verl_result(returned: Any) -> ToolResult:
    """A result of any shape verl takes: a response alone, or with a reward, or with a reward and metrics."""
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise ToolError(f"the tool returned {len(parts)} values, not (response, reward, metrics)")
    response, reward, metrics = (*parts, None, None)[:3]
    score = as_number(reward)
    if score is None and reward is not None:
        raise ToolError(f"the tool returned {reward!r:.80} as its reward; it must be a finite number")
    info = {} if metrics is None else as_json(metrics)
    if not isinstance(info, dict):  # numbers and texts of one call: what cannot be stored is shown instead of lost
        info = {"metrics": repr(metrics)[:1000]}
    text, images = _shown(response)
    return ToolResult(text, images, score, info)


def _shown(response: Any) -> tuple[str, tuple[Image, ...]]:
    if isinstance(response, str):
        return response, ()
    if isinstance(response, dict):
        return json.dumps(response, ensure_ascii=False), ()
    if not all(hasattr(response, name) for name in ("text", "image", "video")):
        return str(response), ()
    if response.video:
        raise ToolError("the tool returned a video, which cannot be shown here")
    text = "" if response.text is None else response.text
    if not isinstance(text, str):
        raise ToolError(f"the tool returned {type(text).__name__} as its text")
    return text, tuple(Image(_image_source(image)) for image in response.image or ())


def _image_source(image: Any) -> str:
    """A data URL, or the path or URL as it was given."""
    if isinstance(image, str):
        return image
    if isinstance(image, Mapping) and isinstance(image.get("image", image.get("bytes")), str | bytes):
        return _image_source(image.get("image", image.get("bytes")))
    content = image
    if hasattr(image, "save"):  # PIL's
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        content = buffer.getvalue()
    url = data_url(content) if isinstance(content, bytes) else None
    if url is None:
        raise ToolError(f"the tool returned {type(image).__name__} as an image; it must be PIL's, bytes or an address")
    return url

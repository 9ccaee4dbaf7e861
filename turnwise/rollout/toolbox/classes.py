"""Tools with a life: a class whose instances are created, called, judged and released, once per call or per episode."""

import asyncio
import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import TypeAdapter

from turnwise.config.choices import Lifecycle
from turnwise.errors import EpisodeError, PluginError
from turnwise.errors.nearest_name import unknown
from turnwise.rollout import plugin_calls
from turnwise.rollout.toolbox.schema import check_schema, check_signature, find_context, read_signature
from turnwise.rollout.tools.tool import (
    DEFAULT_CONCURRENCY,
    DEFAULT_TIMEOUT,
    Tool,
    ToolContext,
    ToolSession,
    as_number,
    as_result,
    read_arguments,
)
from turnwise.types import JsonSchema, ToolResult

HOOKS = {f"{hook}_kwargs": hook for hook in ("create", "execute", "calc_reward", "release")}
"""The keys of a row's `tools_kwargs` for a tool of this kind, and the method that each goes to."""


class ToolClass:
    """A tool that remembers: derive from it and write `execute`, a typed and documented method.

    An instance serves one episode, or one call (`lifecycle`). Every method may be async or plain. What a row gives in
    `tools_kwargs` reaches them by name: `create_kwargs` the parameters of `create` after the context, `execute_kwargs`
    the keyword-only parameters of `execute` (the others are the model's), and so on.
    """

    name: ClassVar[str | None] = None
    """What the model calls it; None makes it of the class's name."""
    schema: ClassVar[JsonSchema | None] = None
    """An OpenAI function schema; None reads it from `execute`, whose docstring, or else the class's, describes it."""
    lifecycle: ClassVar[Lifecycle] = Lifecycle.per_trajectory
    timeout: ClassVar[float] = DEFAULT_TIMEOUT
    concurrency: ClassVar[int] = DEFAULT_CONCURRENCY

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        """What its entry in a YAML file says under `config`: the instance's own copy."""

    # Arguments are open so that a subclass may name its own; what a row gives is checked against the subclass.
    def create(self, context: ToolContext, *_: Any, **kwargs: Any) -> Any:
        """Called before an instance's first call; does nothing unless a subclass overrides it."""

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """One call: text, JSON or a ToolResult; a ToolError is what the model should read."""
        raise NotImplementedError

    def calc_reward(self, *_: Any, **kwargs: Any) -> Any:
        """What its use was worth, asked once before `release`; None says nothing."""

    def release(self, *_: Any, **kwargs: Any) -> Any:
        """Give back what was taken: called once on every path, also when `create` failed half-way."""


@dataclass(frozen=True, slots=True)
class ClassTool:
    """A tool whose sessions are instances of a ToolClass."""

    name: str
    schema: JsonSchema
    kind: type[ToolClass]
    config: dict[str, Any]
    lifecycle: Lifecycle
    readers: dict[str, TypeAdapter[Any]] | None = field(repr=False)
    context_parameter: str | None
    takes: dict[str, frozenset[str] | None]
    """Names that each method takes from a row; None: any."""

    @property
    def timeout(self) -> float:
        return self.kind.timeout

    @property
    def concurrency(self) -> int:
        return self.kind.concurrency

    def with_lifecycle(self, lifecycle: Lifecycle) -> Tool:
        return dataclasses.replace(self, lifecycle=lifecycle)

    def kwargs_problem(self, kwargs: Mapping[str, Any]) -> str | None:
        """What no method would read of a row's `tools_kwargs` for it."""
        for key, values in kwargs.items():
            if key not in HOOKS:
                return unknown("key", key, HOOKS)
            takes = self.takes[HOOKS[key]]
            for name in values if takes is not None else ():
                if name not in (takes or ()):
                    own = f"{self.kind.__name__}.{HOOKS[key]} takes"
                    return f"{key}: {unknown('argument', name, takes)}" if takes else f"{key}: {own} no {name!r}"
        return None

    async def open(self, context: ToolContext) -> ToolSession:
        if self.lifecycle is Lifecycle.per_call:
            return _PerCall(self, context)
        instance = await _Instance.make(self, context)
        await instance.create()
        return instance


@dataclass(slots=True)
class _Instance:
    """One instance at work; `create` must come first, and gives it back when it fails."""

    tool: ClassTool
    context: ToolContext
    made: ToolClass
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls of one turn run side by side, and an instance has a state."""

    @classmethod
    async def make(cls, tool: ClassTool, context: ToolContext) -> "_Instance":
        config = copy.deepcopy(tool.config)
        own = tool.kind.__init__ is not ToolClass.__init__  # then it may block
        return cls(tool, context, await plugin_calls.call(tool.kind, config) if own else tool.kind(config))

    async def create(self) -> None:
        try:
            await self._run("create", self.context)
        except BaseException:  # cancellation too: what it had opened by then is released
            await self.close()
            raise

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        tool = self.tool
        values = arguments if tool.readers is None else read_arguments(tool.name, tool.readers, arguments)
        if tool.context_parameter is not None:
            values = {**values, tool.context_parameter: self.context}
        async with self.one_at_a_time:
            return as_result(await self._run("execute", **values))

    async def calc_reward(self) -> float | None:
        if self.tool.kind.calc_reward is ToolClass.calc_reward:
            return None
        value = await self._run("calc_reward")
        reward = as_number(value)
        if reward is None and value is not None:
            raise EpisodeError(f"tool {self.tool.name!r}: calc_reward returned {repr(value)[:80]}, not a finite number")
        return reward

    async def close(self) -> None:
        await self._run("release")

    async def _run(self, hook: str, *args: Any, **given: Any) -> Any:
        method = getattr(self.made, hook)
        if method.__func__ is getattr(ToolClass, hook):  # nothing of the author's
            return None
        row = self.context.kwargs.get(f"{hook}_kwargs", {})
        return await plugin_calls.call(method, *args, **{**row, **given})


@dataclass(slots=True)
class _PerCall:
    """An instance for each call. What it was worth is the call's score where the call gives none itself."""

    tool: ClassTool
    context: ToolContext

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        instance = await _Instance.make(self.tool, self.context)
        await instance.create()
        try:
            result = await instance.call(arguments)
            reward = await instance.calc_reward()
        finally:
            await instance.close()
        if reward is None:
            return result
        score = reward if result.score is None else result.score
        return dataclasses.replace(result, score=score, info={**result.info, "calc_reward": reward})

    async def close(self) -> None:
        return None


def class_tool(kind: type[ToolClass], config: dict[str, Any], schema: JsonSchema | None = None) -> ClassTool:
    """The tool of a class; a schema given here, or on the class, is kept as it is."""
    schema = schema or kind.schema
    name = kind.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()
    if schema is not None:
        check_schema(schema, name)
        if kind.name not in (None, schema["function"]["name"]):
            raise PluginError(f"tool {kind.name!r}: its schema calls it {schema['function']['name']!r}")
        name = schema["function"]["name"]
    if not kind.timeout > 0 or kind.concurrency < 1:
        raise PluginError(f"tool {name!r}: timeout must be above 0 and concurrency at least 1")
    if kind.execute is ToolClass.execute:
        raise PluginError(f"tool {name!r}: {kind.__name__} has no `execute`")
    for hook in HOOKS.values():
        if not inspect.isfunction(inspect.getattr_static(kind, hook)):
            raise PluginError(f"tool {name!r}: {kind.__name__}.{hook} must be an ordinary method")
    context = find_context(kind.execute, name, ToolContext)
    rows = _row_parameters(kind.execute) - {context}
    hidden = {next(iter(inspect.signature(kind.execute).parameters), "self"), *rows}
    readers = None
    if schema is None:
        docs = kind.execute.__doc__ or kind.__doc__
        read = read_signature(kind.execute, name, ToolContext, hidden=hidden, docs=docs or "")
        schema, readers = {"type": "function", "function": read.schema}, read.readers
        check_schema(schema, name)
    else:
        check_signature(kind.execute, name, context, schema, hidden=hidden)
    takes = {
        "execute": frozenset(rows),
        **{hook: _names(kind, hook, name) for hook in HOOKS.values() if hook != "execute"},
    }
    return ClassTool(name, schema, kind, dict(config), kind.lifecycle, readers, context, takes)


def _row_parameters(execute: Callable[..., Any]) -> set[str]:
    """The parameters of `execute` that are a row's to give."""
    return {p.name for p in inspect.signature(execute).parameters.values() if p.kind is p.KEYWORD_ONLY}


def _names(kind: type[ToolClass], hook: str, name: str) -> frozenset[str] | None:
    """What a row may give to a hook, by name."""
    method = getattr(kind, hook)
    if method is getattr(ToolClass, hook):
        return frozenset()
    parameters = list(inspect.signature(method).parameters.values())
    own = 2 if hook == "create" else 1  # self, and the context
    if sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) < own:
        wanted = "(self, context, ...)" if hook == "create" else "(self, ...)"
        raise PluginError(f"tool {name!r}: {kind.__name__}.{hook} must take {wanted}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters[own:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))

"""Running tool calls: every call gets an answer and a record, whatever the model or the tool does."""

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from turnwise import time_budget
from turnwise.choices import Keep
from turnwise.config import RolloutConfig, SandboxConfig
from turnwise.errors import EpisodeError, PluginError, ToolError, TurnwiseError, nearest
from turnwise.plugins import builtin, load, names_in
from turnwise.rollout import plugin_calls
from turnwise.rollout.tool_schema import BadArguments, PlainArguments, check_arguments, parameters_of, validator_of
from turnwise.rollout.tools.python import PythonTool
from turnwise.rollout.tools.tool import FunctionTool, Service, Tool, ToolContext, ToolSession, as_result, tool
from turnwise.strict_yaml import read_yaml
from turnwise.types import CallRecord, CallStatus, JsonSchema, Message, Role, Sample, ToolCall, ToolResult
from turnwise.verl_imports import DOCS

CLOSE_SECONDS = 10.0


def load_tool(spec: str, sandbox: SandboxConfig | None = None) -> Tool:
    """A tool by built-in name or module:function; a plain typed function is made into one.

    Those that run code get the sandbox.
    """
    if spec.endswith((".yaml", ".yml")):
        raise PluginError(_instead_of_yaml(spec))
    if ":" in spec or "." in spec:
        found = load(spec, "tool")
    else:
        found = vars(builtin("turnwise.rollout.tools", spec, "tool", leave_out=("tool",)))[spec]
    if sandbox is not None and isinstance(found, PythonTool):
        return PythonTool(found.name, sandbox)  # a run's own: it has a pool to start and to stop
    return as_tool(found)


def _instead_of_yaml(spec: str) -> str:
    """What to do with a file of tools, such as verl's, which names classes that are not run here yet."""
    try:
        content = read_yaml(Path(spec)) if Path(spec).is_file() else None
    except TurnwiseError:  # it is refused anyhow
        content = None
    entries = content.get("tools") if isinstance(content, dict) else None
    classes = [str(entry["class_name"]) for entry in entries or () if isinstance(entry, dict) and "class_name" in entry]
    what = (
        f"verl's tool config, whose classes ({', '.join(classes)}) are not run here yet" if classes else "a YAML file"
    )
    return (
        f"rollout.tools: {spec} is {what}: name tools themselves, built-in ones ({', '.join(builtin_tools())}) or your "
        f"own as file.py:function, a typed function with @turnwise.tool; see {DOCS}"
    )


def builtin_tools() -> list[str]:
    """Names of the built-in tools."""
    return [name for name in names_in("turnwise.rollout.tools") if name != "tool"]


def as_tool(found: object) -> Tool:
    """A tool object as it is, a function as a FunctionTool."""
    if isinstance(found, FunctionTool):
        return found
    if isinstance(found, type) and hasattr(found, "execute"):
        raise PluginError(
            f"{found!r} looks like verl's tool class, which is not run here yet: write its `execute` as a typed "
            f"function with @turnwise.tool; see {DOCS}"
        )
    if isinstance(found, type):
        raise PluginError(f"{found!r} is not a tool but a class: name an instance, or decorate a function with @tool")
    if all(hasattr(found, name) for name in ("name", "schema", "timeout", "concurrency", "open")):
        return found  # type: ignore[return-value]
    if callable(found):
        return tool(found)
    raise PluginError(f"{found!r} is not a tool: decorate a typed function with @tool")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tool with what is made of it once: its validator and its slots."""

    tool: Tool
    validator: jsonschema.Draft202012Validator
    slots: asyncio.Semaphore
    plain: PlainArguments | None


class Toolbox:
    """The tools of a run, with one limit per tool on calls under way.

    `common` are the configured ones, for samples that select none; built-in tools that a sample selects join when
    first named.
    """

    def __init__(self, tools: Sequence[Tool], config: RolloutConfig, sandbox: SandboxConfig | None = None) -> None:
        self.tools: dict[str, Tool] = {}
        self._config = config
        self._sandbox = sandbox or SandboxConfig()
        self._schemas: dict[str, JsonSchema] = {}
        """Asked for once: renderers know a tool by the identity of its schema, and some make one whenever asked."""
        self._validators: dict[str, jsonschema.Draft202012Validator] = {}
        self._entries: dict[str, _Entry] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        for entry in tools:
            self._add(entry)
        self.common = tuple(self.tools)

    def names_for(self, sample: Sample) -> tuple[str, ...]:
        """The tools this sample may use."""
        if sample.tools is None:
            return self.common
        for name in sample.tools:
            if name not in self.tools:
                if name not in builtin_tools():
                    hint = nearest(name, [*self.tools, *builtin_tools()])
                    raise PluginError(f"sample {sample.id}: tool_selection names {name!r}, which nobody offers: {hint}")
                self._add(load_tool(name, self._sandbox))
        return sample.tools

    def _add(self, entry: Tool) -> None:
        if entry.name in self.tools:
            raise PluginError(f"two tools are called {entry.name!r}")
        schema = entry.schema
        self._validators[entry.name] = validator_of(schema, entry.name)
        if schema["function"]["name"] != entry.name:
            raise PluginError(f"tool {entry.name!r}: its schema calls it {schema['function']['name']!r}")
        self.tools[entry.name], self._schemas[entry.name] = entry, schema

    def shared(self) -> list[Tool]:
        """The configured tools, for another toolbox of the same run: one sandbox serves both."""
        return [self.tools[name] for name in self.common]

    def schemas(self, names: Sequence[str]) -> list[JsonSchema]:
        """What the model is told of these tools: the same objects each time."""
        return [self._schemas[name] for name in names]

    @contextlib.asynccontextmanager
    async def running(self, say: Callable[[str], None]) -> AsyncIterator[None]:
        """Services among the tools are started, and stopped on every path."""
        async with contextlib.AsyncExitStack() as stack:
            for name, chosen in self.tools.items():
                if isinstance(chosen, Service):
                    stack.push_async_callback(chosen.stop)
                    say(f"tool {name}: {await chosen.start()}")
            yield

    def open(self, sample: Sample, names: Sequence[str], seed: int = 0) -> "EpisodeTools":
        """The tools at work in one episode."""
        return EpisodeTools({name: self._entry(name) for name in names}, sample, self._config, seed)

    def _entry(self, name: str) -> _Entry:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # slots belong to one event loop; a second run has another
            self._loop, self._entries = loop, {}
        if name not in self._entries:
            found = self.tools[name]
            slots, plain = asyncio.Semaphore(found.concurrency), PlainArguments.of(parameters_of(found.schema))
            self._entries[name] = _Entry(found, self._validators[name], slots, plain)
        return self._entries[name]


@dataclass(slots=True)
class EpisodeTools:
    """Sessions of one episode, opened at their first call and closed by `close`."""

    entries: Mapping[str, _Entry]
    sample: Sample
    config: RolloutConfig
    seed: int
    sessions: dict[str, asyncio.Task[ToolSession]] = field(default_factory=dict)
    _own_sample: Sample | None = None

    async def call(self, calls: Sequence[ToolCall], records: list[CallRecord]) -> list[Message]:
        """Run the calls of one turn side by side; answers and `records` keep the order of the calls.

        When the episode ends meanwhile, the records say which calls were under way.
        """
        start = time.perf_counter()
        done: dict[int, CallRecord] = {}
        unfinished = CallStatus.ERROR
        try:
            if len(calls) == 1:  # the usual case needs no task
                return [await self._answer(0, calls[0], done)]
            return await _together([self._answer(number, call, done) for number, call in enumerate(calls)])
        except asyncio.CancelledError:
            unfinished = CallStatus.TIMEOUT
            raise
        finally:
            seconds = time.perf_counter() - start
            records += [done.get(i) or CallRecord(call, unfinished, seconds) for i, call in enumerate(calls)]

    async def close(self) -> list[str]:
        """Close every session; what went wrong is returned, not raised, so that all of them are tried."""
        if not self.sessions:
            return []
        found = await asyncio.gather(*(self._close(name, opening) for name, opening in self.sessions.items()))
        self.sessions.clear()
        return [problem for problem in found if problem is not None]

    async def _close(self, name: str, opening: asyncio.Task[ToolSession]) -> str | None:
        try:
            if not opening.done():
                opening.cancel()
                await asyncio.wait((opening,), timeout=CLOSE_SECONDS)
            if not opening.done():
                return f"closing tool {name}: it is still opening after {CLOSE_SECONDS:g} s"
            if opening.cancelled() or opening.exception() is not None:
                return None  # it never opened; the call that opened it has reported why
            await plugin_calls.in_task(opening.result().close(), CLOSE_SECONDS)
        except plugin_calls.TookTooLong:
            return f"closing tool {name}: not closed after {CLOSE_SECONDS:g} s"
        except Exception as error:  # a tool's own code: recorded on the trajectory
            return f"closing tool {name}: {type(error).__name__}: {error}"
        return None

    async def _answer(self, number: int, call: ToolCall, done: dict[int, CallRecord]) -> Message:
        start = time.perf_counter()
        status, result = await self._run(number, call)
        text, truncated = _fit(result.text, self.config.max_tool_reply_chars, self.config.keep)
        done[number] = CallRecord(call, status, time.perf_counter() - start, truncated, result.score, result.info)
        return Message(Role.TOOL, clean(text), tool_call_id=call.id, name=clean(call.name) or None)

    async def _run(self, number: int, call: ToolCall) -> tuple[CallStatus, ToolResult]:
        limit = self.config.max_parallel_calls
        if call.problem is not None:
            return CallStatus.MALFORMED, ToolResult(f"Error: {call.problem}")
        if number >= limit:
            return CallStatus.REFUSED, ToolResult(f"Error: not run; at most {limit} calls are allowed in one turn")
        entry = self.entries.get(call.name)
        if entry is None:
            hint = nearest(call.name, self.entries)
            return CallStatus.UNKNOWN_TOOL, ToolResult(f"Error: unknown tool {call.name!r}: {hint}")
        seconds = entry.tool.timeout if self.config.tool_timeout is None else self.config.tool_timeout
        try:
            if entry.plain is None or not entry.plain.fit(call.arguments):
                check_arguments(entry.validator, call.name, call.arguments)
            if isinstance(entry.tool, FunctionTool) and entry.tool.instant:
                return CallStatus.OK, await self._attempt(entry.tool, call)
            plugin_calls.check_leaked()
            async with time_budget.slot(entry.slots):
                return CallStatus.OK, await plugin_calls.in_task(self._attempt(entry.tool, call), seconds)
        except BadArguments as error:
            return CallStatus.BAD_ARGUMENTS, ToolResult(f"Error: {error}")
        except ToolError as error:
            return CallStatus.ERROR, ToolResult(f"Error: {error}")
        except plugin_calls.TookTooLong:
            return CallStatus.TIMEOUT, ToolResult(f"Error: {call.name} took longer than {seconds:g} s")
        except plugin_calls.PluginCallError as error:
            return CallStatus.CRASHED, ToolResult(f"Error: {error}")
        except (EpisodeError, PluginError):
            raise
        except Exception as error:  # a tool is a user's code: the model is told, the record keeps it
            return CallStatus.CRASHED, ToolResult(f"Error: {type(error).__name__}: {error}")

    async def _attempt(self, chosen: Tool, call: ToolCall) -> ToolResult:
        try:
            arguments = _copied(call.arguments)  # the call is on record; a tool may change what it is given
        except RecursionError as error:
            raise BadArguments(f"bad arguments for {call.name}: nested too deeply") from error
        if isinstance(chosen, FunctionTool):  # stateless: nothing to open, nothing to close
            result = await chosen.run(arguments, None if chosen.context_parameter is None else self._context(chosen))
        else:
            session = await self._session(chosen)
            result = as_result(await session.call(arguments))
        if result.images:
            raise PluginError(f"tool {call.name!r} returned an image; replies to the model are text only")
        return result

    async def _session(self, chosen: Tool) -> ToolSession:
        opening = self.sessions.get(chosen.name)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            # A task, so that two calls of one turn share the session and `close` can wait for its opening.
            opening = asyncio.ensure_future(plugin_calls.guarded(chosen.open(self._context(chosen))))
            self.sessions[chosen.name] = opening
        return await asyncio.shield(opening)

    def _context(self, chosen: Tool) -> ToolContext:
        if self._own_sample is None:
            self._own_sample = copy.deepcopy(self.sample)
        return ToolContext(self._own_sample, self._own_sample.tools_kwargs.get(chosen.name, {}), self.seed)


def _copied(value: Any) -> Any:
    """A deep copy, quick for what JSON is made of."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) is list:
        return [_copied(item) for item in value]
    return value if value is None or type(value) in (str, int, float, bool) else copy.deepcopy(value)


async def _together(answers: Sequence[Coroutine[Any, Any, Message]]) -> list[Message]:
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await plugin_calls.to_the_end(_settled(tasks))


async def _settled(tasks: Sequence["asyncio.Task[Message]"]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def clean(text: str) -> str:
    """Text every tokenizer can take: no NUL, no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}")


def _fit(text: str, limit: int, keep: Keep) -> tuple[str, bool]:
    """(the text cut to `limit` characters with a note of how many are missing, whether it was cut)."""
    if len(text) <= limit:
        return text, False
    note = f"\n[... {len(text) - limit} characters left out ...]\n"
    match keep:
        case Keep.head:
            return text[:limit] + note, True
        case Keep.tail:
            return note + text[len(text) - limit :], True
        case Keep.both:
            return text[: limit - limit // 2] + note + text[len(text) - limit // 2 :], True

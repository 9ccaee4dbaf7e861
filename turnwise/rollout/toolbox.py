"""Running tool calls: every call gets an answer and a record, whatever the model or the tool does."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.config import Keep, RolloutConfig
from turnwise.errors import EpisodeError, PluginError, ToolError, nearest
from turnwise.plugins import builtin, load, names_in
from turnwise.rollout.tools.tool import FunctionTool, Tool, ToolContext, ToolSession, tool, validate
from turnwise.types import CallRecord, CallStatus, JsonSchema, Message, Role, Sample, ToolCall, ToolResult

CLOSE_SECONDS = 10.0


def load_tool(spec: str) -> Tool:
    """A tool by built-in name or module:function; a plain typed function is made into one."""
    if ":" in spec or "." in spec:
        found = load(spec, "tool")
    else:
        found = vars(builtin("turnwise.rollout.tools", spec, "tool", leave_out=("tool",)))[spec]
    return as_tool(found)


def builtin_tools() -> list[str]:
    """Names of the built-in tools."""
    return [name for name in names_in("turnwise.rollout.tools") if name != "tool"]


def as_tool(found: object) -> Tool:
    """A tool object as it is, a function as a FunctionTool."""
    if isinstance(found, FunctionTool):
        return found
    if all(hasattr(found, name) for name in ("name", "schema", "timeout", "concurrency", "open")):
        return found  # type: ignore[return-value]
    if callable(found) and not isinstance(found, type):
        return tool(found)
    raise PluginError(f"{found!r} is not a tool: decorate a typed function with @tool")


class Toolbox:
    """The tools of a run, with one limit per tool on calls under way.

    `common` are the configured ones, for samples that select none; built-in tools that a sample selects join when
    first named.
    """

    def __init__(self, tools: Sequence[Tool], config: RolloutConfig) -> None:
        self.tools: dict[str, Tool] = {}
        self._config = config
        self._slots: dict[str, asyncio.Semaphore] = {}
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
                self._add(load_tool(name))
        return sample.tools

    def _add(self, entry: Tool) -> None:
        if entry.name in self.tools:
            raise PluginError(f"two tools are called {entry.name!r}")
        self.tools[entry.name] = entry
        self._slots[entry.name] = asyncio.Semaphore(entry.concurrency)

    def schemas(self, names: Sequence[str]) -> list[JsonSchema]:
        """What the model is told of these tools."""
        return [self.tools[name].schema for name in names]

    def open(self, sample: Sample, names: Sequence[str]) -> "EpisodeTools":
        """The tools at work in one episode."""
        return EpisodeTools({name: self.tools[name] for name in names}, self._slots, sample, self._config)


@dataclass(slots=True)
class EpisodeTools:
    """Sessions of one episode, opened at their first call and closed by `close`."""

    tools: Mapping[str, Tool]
    slots: Mapping[str, asyncio.Semaphore]
    sample: Sample
    config: RolloutConfig
    sessions: dict[str, asyncio.Task[ToolSession]] = field(default_factory=dict)

    async def call(self, calls: Sequence[ToolCall]) -> list[tuple[Message, CallRecord]]:
        """Run the calls of one turn side by side; answers keep the order of the calls."""
        tasks = [asyncio.ensure_future(self._answer(number, call)) for number, call in enumerate(calls)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> list[str]:
        """Close every session; what went wrong is returned, not raised, so that all of them are tried."""
        problems = []
        for name, opening in self.sessions.items():
            if not opening.done():
                opening.cancel()
            (session,) = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(session, BaseException):
                continue  # it never opened; the call that opened it has reported why
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await session.close()
            except Exception as error:  # a tool's own code: recorded on the trajectory
                problems.append(f"closing tool {name}: {type(error).__name__}: {error}")
        return problems

    async def _answer(self, number: int, call: ToolCall) -> tuple[Message, CallRecord]:
        start = time.perf_counter()
        status, result = await self._run(number, call)
        text, truncated = _fit(_clean(result.text), self.config.max_tool_reply_chars, self.config.keep)
        message = Message(Role.TOOL, text, tool_call_id=call.id, name=call.name or None)
        seconds = time.perf_counter() - start
        return message, CallRecord(call, status, seconds, truncated, result.score, result.info)

    async def _run(self, number: int, call: ToolCall) -> tuple[CallStatus, ToolResult]:
        limit = self.config.max_parallel_calls
        if call.problem is not None:
            return CallStatus.MALFORMED, ToolResult(f"Error: {call.problem}")
        if number >= limit:
            return CallStatus.REFUSED, ToolResult(f"Error: not run; at most {limit} calls are allowed in one turn")
        chosen = self.tools.get(call.name)
        if chosen is None:
            return CallStatus.UNKNOWN_TOOL, ToolResult(
                f"Error: unknown tool {call.name!r}: {nearest(call.name, self.tools)}"
            )
        try:
            validate(chosen, call.arguments)
        except ToolError as error:
            return CallStatus.BAD_ARGUMENTS, ToolResult(f"Error: {error}")
        seconds = chosen.timeout if self.config.tool_timeout is None else self.config.tool_timeout
        async with self.slots[chosen.name]:
            try:
                async with asyncio.timeout(seconds) as deadline:
                    session = await self._session(chosen)
                    return CallStatus.OK, await session.call(call.arguments)
            except ToolError as error:
                return CallStatus.ERROR, ToolResult(f"Error: {error}")
            except (EpisodeError, PluginError):
                raise
            except Exception as error:  # a tool is a stranger's code: the model is told, the record keeps it
                if isinstance(error, TimeoutError) and deadline.expired():
                    return CallStatus.TIMEOUT, ToolResult(f"Error: {chosen.name} took longer than {seconds:g} s")
                return CallStatus.ERROR, ToolResult(f"Error: {type(error).__name__}: {error}")

    async def _session(self, chosen: Tool) -> ToolSession:
        if chosen.name not in self.sessions:
            context = ToolContext(self.sample, self.sample.tools_kwargs.get(chosen.name, {}))
            # A task, so that two calls of one turn share the session and `close` can wait for its opening.
            self.sessions[chosen.name] = asyncio.ensure_future(chosen.open(context))
        return await asyncio.shield(self.sessions[chosen.name])


def _clean(text: str) -> str:
    """Text every tokenizer can take: no NUL, no lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "\N{REPLACEMENT CHARACTER}")


def _fit(text: str, limit: int, keep: Keep) -> tuple[str, bool]:
    """(the text cut to `limit` characters with a note of how many are missing, whether it was cut)."""
    if len(text) <= limit:
        return text, False
    note = f"\n[... {len(text) - limit} characters left out ...]\n"
    match keep:
        case Keep.head:
            return text[:limit] + note, True
        case Keep.tail:
            return note + text[-limit:], True
        case Keep.both:
            return text[: limit - limit // 2] + note + text[len(text) - limit // 2 :], True

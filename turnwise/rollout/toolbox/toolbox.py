"""Running tool calls: every call gets an answer and a record, whatever the model or the tool does."""

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.config import Config, RolloutConfig
from turnwise.config.choices import Keep
from turnwise.errors import ConfigError, DataError, EpisodeError, PluginError, ToolError
from turnwise.errors.nearest_name import nearest
from turnwise.rollout import plugin_calls
from turnwise.rollout.sample_images import MadeImage
from turnwise.rollout.toolbox.images import PrepareImages, ShowImages, with_images
from turnwise.rollout.toolbox.loading import builtin_tools, load_tool
from turnwise.rollout.toolbox.options import RateLimit, ToolOptions, ToolWithOptions, read_options, with_options
from turnwise.rollout.toolbox.replies import TokenSpans, fit
from turnwise.rollout.toolbox.schema import ArgumentChecker, BadArguments, CheckTookTooLong, check_number
from turnwise.rollout.tools.tool import (
    FunctionTool,
    RewardingSession,
    Service,
    Tool,
    ToolContext,
    ToolSession,
    as_result,
)
from turnwise.system import resources, time_budget
from turnwise.system.plugins import LONGEST_NAME
from turnwise.types import CallRecord, CallStatus, JsonSchema, Message, Part, Role, Sample, Text, ToolCall, ToolResult

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tool with what is made of it once: its validator, its slots, and what its options come to."""

    tool: Tool
    checker: ArgumentChecker
    slots: asyncio.Semaphore
    checking: asyncio.Semaphore
    """One check of its arguments at a time: a schema that takes long leaves the others room."""
    instant: bool
    """It neither waits nor hangs, and nobody limits it: it needs no slot, and no task in which it could be stopped."""
    rate: RateLimit | None
    seconds: float
    reply_tokens: int
    keep: Keep
    image_size: tuple[int, int] | None
    around: tuple[str, str]


class Toolbox:
    """The tools of a run, with one limit per tool on calls under way.

    `common` are the configured ones, for samples that select none; built-in tools that a sample selects join when
    first named.
    """

    def __init__(self, tools: Sequence[Tool], config: RolloutConfig, run: Config | None = None) -> None:
        """`run` is the whole config, for tools that are made for a run."""
        self.tools: dict[str, Tool] = {}
        self._offered: dict[str, Tool] = {}
        """The same with their options."""
        self._options = {
            name: read_options(settings, f"rollout.tool_options.{name}")
            for name, settings in config.tool_options.items()
        }
        self._config = config
        self._run = run or Config(rollout=config)
        self._schemas: dict[str, JsonSchema] = {}
        """Asked for once: renderers know a tool by the identity of its schema, and some make one whenever asked."""
        self._checkers: dict[str, ArgumentChecker] = {}
        self._entries: dict[str, _Entry] = {}
        self.show: ShowImages | None = None
        """What the model is shown instead of tools' images; None shows them. For probes."""
        self._loop: asyncio.AbstractEventLoop | None = None
        check_number(len(tools), "rollout.tools")
        for entry in tools:
            self._add(entry)
        self.common = tuple(self.tools)
        available = {*self.tools, *builtin_tools()}  # a sample may select a built-in one
        if stray := [name for name in self._options if name not in available]:
            raise ConfigError(f"rollout.tool_options: there is no tool {stray[0]!r}: {nearest(stray[0], available)}")

    def names_for(self, sample: Sample) -> tuple[str, ...]:
        """The tools this sample may use."""
        if sample.tools is None:
            return self.common
        for name in sample.tools:
            if name not in self.tools:
                if name not in builtin_tools():
                    named = name[:LONGEST_NAME]
                    hint = f"which is not available: {nearest(named, [*self.tools, *builtin_tools()])}"
                    raise PluginError(f"sample {sample.id}: tool_selection names {named!r}, {hint}")
                self._add(load_tool(name, self._run))
        return sample.tools

    def _add(self, entry: Tool) -> None:
        if entry.name in self.tools:
            raise PluginError(f"two tools are called {entry.name!r}")
        schema = entry.schema
        self._checkers[entry.name] = ArgumentChecker.of(schema, entry.name)
        if schema["function"]["name"] != entry.name:
            raise PluginError(f"tool {entry.name!r}: its schema calls it {schema['function']['name']!r}")
        offered = with_options(entry, self._options.get(entry.name, ToolOptions()))
        self._offered[entry.name], self._schemas[entry.name] = offered, schema
        self.tools[entry.name] = offered.tool if isinstance(offered, ToolWithOptions) else offered

    def shared(self) -> list[Tool]:
        """The configured tools, for another toolbox of the same run: one sandbox and one rate limit serve both."""
        return [self._offered[name] for name in self.common]

    def schemas(self, names: Sequence[str]) -> list[JsonSchema]:
        """What the model is told of these tools: the same objects each time."""
        return [self._schemas[name] for name in names]

    @contextlib.asynccontextmanager
    async def running(self, say: Callable[[str], None]) -> AsyncIterator[None]:
        """Services among the tools are started, and stopped on every path."""
        async with contextlib.AsyncExitStack() as stack:
            started: list[Service] = []
            for name, chosen in self.tools.items():
                service = getattr(chosen, "service", chosen)
                if isinstance(service, Service) and not any(service is other for other in started):
                    started.append(service)
                    stack.push_async_callback(service.stop)
                    say(f"tool {name}: {await service.start()}")
            yield

    def open(
        self,
        sample: Sample,
        names: Sequence[str],
        seed: int = 0,
        *,
        spans: TokenSpans | None = None,
        takes_images: bool = False,
    ) -> "EpisodeTools":
        """The tools at work in one episode: its model's tokens (None: nobody knows), and whether it sees images."""
        entries = {name: self._entry(name) for name in names}
        return EpisodeTools(entries, sample, self._config, seed, spans, takes_images, show=self.show)

    def _entry(self, name: str) -> _Entry:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # slots belong to one event loop; a second run has another
            self._loop, self._entries = loop, {}
        if name not in self._entries:
            self._entries[name] = self._make_entry(name)
        return self._entries[name]

    def _make_entry(self, name: str) -> _Entry:
        original, offered, config = self.tools[name], self._offered[name], self._config
        limited = offered if isinstance(offered, ToolWithOptions) else None
        options = ToolOptions() if limited is None else limited.options
        seconds = options.timeout or (original.timeout if config.tool_timeout is None else config.tool_timeout)
        free = (options.timeout, options.concurrency, options.rate_limit) == (None, None, None)
        return _Entry(
            original,
            self._checkers[name],
            asyncio.Semaphore(resources.part_of(offered.concurrency)),
            asyncio.Semaphore(1),
            instant=free and isinstance(original, FunctionTool) and original.instant,
            rate=None if limited is None else limited.rate,
            seconds=seconds,
            reply_tokens=options.max_reply_tokens or config.max_reply_tokens,
            keep=options.keep or config.keep,
            image_size=options.image_size,
            around=options.around,
        )


@dataclass(slots=True)
class EpisodeTools:
    """Sessions of one episode, opened at their first call and closed by `close`."""

    entries: Mapping[str, _Entry]
    sample: Sample
    config: RolloutConfig
    seed: int
    spans: TokenSpans | None = None
    takes_images: bool = False
    prepare_images: PrepareImages | None = None
    """Prepares images for the model; DataError for one that it cannot be shown."""
    show: ShowImages | None = None
    messages: Sequence[Message] = ()
    """The episode's conversation, as it goes on."""
    rewards: dict[str, float] = field(default_factory=dict)
    """What tools said at the end that their use was worth; filled by `close`."""
    sessions: dict[str, asyncio.Task[ToolSession]] = field(default_factory=dict)
    made: list[MadeImage] = field(default_factory=list)
    """What tools gave back, in the order of the calls: the same on every machine, whichever of a turn ends first."""
    _own_sample: Sample | None = None
    _made_now: dict[int, list[MadeImage]] = field(default_factory=dict)
    """Those of the turn under way, by the number of the call."""

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
            self.made += [image for number in sorted(self._made_now) for image in self._made_now[number]]
            self._made_now.clear()

    async def close(self, *, scored: bool = True) -> list[str]:
        """Close every session; what went wrong is returned, not raised, so that all of them are tried.

        Before, those that reward are asked what their use was worth, unless the episode is not to be scored.
        """
        if not self.sessions:
            return []
        results = await asyncio.gather(*(self._end(name, task, scored) for name, task in self.sessions.items()))
        self.sessions.clear()
        return [problem for problems in results for problem in problems]

    async def _end(self, name: str, opening: asyncio.Task[ToolSession], scored: bool) -> list[str]:
        unrewarded = await self._reward(name, opening) if scored else None
        return [problem for problem in (unrewarded, await self._close(name, opening)) if problem is not None]

    async def _reward(self, name: str, opening: asyncio.Task[ToolSession]) -> str | None:
        if not opening.done() or opening.cancelled() or opening.exception() is not None:
            return None
        session = opening.result()
        if not isinstance(session, RewardingSession):
            return None
        try:
            reward = await plugin_calls.in_task(session.calc_reward(), CLOSE_SECONDS)
        except plugin_calls.TookTooLong:
            return f"tool {name}: calc_reward took longer than {CLOSE_SECONDS:g} s"
        except Exception as error:  # a tool's own code: recorded on the trajectory
            return f"tool {name}: calc_reward: {type(error).__name__}: {error}"
        if reward is not None:
            self.rewards[name] = reward
        return None

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
        entry = self.entries.get(call.name)
        most, keep = (entry.reply_tokens, entry.keep) if entry else (self.config.max_reply_tokens, self.config.keep)
        text, truncated = await self._fit(clean(result.text), most, keep)
        done[number] = CallRecord(call, status, time.perf_counter() - start, truncated, result.score, result.info)
        if result.images and not self.takes_images:
            text = f"{text}\n[{len(result.images)} images are not shown: the model reads text only]".lstrip("\n")
        before, after = entry.around if entry else ("", "")
        content: str | tuple[Part, ...] = f"{before}{text}{after}"
        if result.images and self.takes_images:
            content = (Text(before + text), *result.images, *([Text(after)] if after else ()))
        return Message(Role.TOOL, content, tool_call_id=call.id, name=clean(call.name) or None)

    async def _fit(self, text: str, limit: int, keep: Keep) -> tuple[str, bool]:
        return await fit(text, limit, keep, self.spans)

    async def _run(self, number: int, call: ToolCall) -> tuple[CallStatus, ToolResult]:
        limit = self.config.max_parallel_calls
        if call.problem is not None:
            return self._failed(CallStatus.MALFORMED, call.problem)
        if number >= limit:
            return self._failed(CallStatus.REFUSED, f"not run; at most {limit} calls are allowed in one turn")
        entry = self.entries.get(call.name)
        if entry is None:
            hint = nearest(call.name, self.entries)
            return self._failed(CallStatus.UNKNOWN_TOOL, f"unknown tool {call.name!r}: {hint}", KeyError(call.name))
        seconds = entry.seconds
        try:
            await self._check(entry, call)
            if entry.instant:
                return CallStatus.OK, await self._attempt(number, entry, call)
            plugin_calls.check_leaked()
            async with time_budget.slot(entry.slots):
                if entry.rate is not None:
                    await entry.rate.turn()
                return CallStatus.OK, await plugin_calls.in_task(self._attempt(number, entry, call), seconds)
        except BadArguments as error:
            return self._failed(CallStatus.BAD_ARGUMENTS, str(error), error)
        except ToolError as error:
            return self._failed(CallStatus.ERROR, str(error), error)
        except plugin_calls.TookTooLong:
            return self._failed(CallStatus.TIMEOUT, f"{call.name} took longer than {seconds:g} s")
        except CheckTookTooLong as error:
            return self._failed(CallStatus.TIMEOUT, f"checking the arguments of {call.name}: {error}")
        except plugin_calls.PluginCallError as error:
            return self._failed(CallStatus.CRASHED, str(error), error)
        except (EpisodeError, PluginError):
            raise
        except Exception as error:  # a tool is a user's code: the model is told, the record keeps it
            return self._failed(CallStatus.CRASHED, f"{type(error).__name__}: {error}", error)

    async def _check(self, entry: _Entry, call: ToolCall) -> None:
        if entry.checker.fits_plainly(call.arguments):
            return
        async with time_budget.slot(entry.checking):
            await entry.checker.check(call.arguments)

    def _failed(
        self, status: CallStatus, problem: str, error: Exception | None = None
    ) -> tuple[CallStatus, ToolResult]:
        """What the model reads of a call that came to nothing."""
        return status, ToolResult(f"Error: {problem}")

    async def _attempt(self, number: int, entry: _Entry, call: ToolCall) -> ToolResult:
        chosen = entry.tool
        try:
            arguments = _copied(call.arguments)  # the call is on record; a tool may change what it is given
        except RecursionError as error:
            raise BadArguments(f"bad arguments for {call.name}: nested too deeply") from error
        if isinstance(chosen, FunctionTool):  # stateless: nothing to open, nothing to close
            result = await chosen.run(arguments, None if chosen.context_parameter is None else self._context(chosen))
        else:
            result = as_result(await (await self._session(chosen)).call(arguments))
        if not result.images:
            return result
        result, self._made_now[number] = await with_images(result, entry.image_size)
        if self.show is not None:  # the record keeps what the tool gave
            result = replace(result, images=await self.show(self.sample, len(self.made) + number, result.images))
        if self.prepare_images is not None and self.takes_images:
            try:
                await self.prepare_images(result.images)
            except DataError as error:
                raise ToolError(f"its image cannot be shown: {error}") from error
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
        kwargs = self._own_sample.tools_kwargs.get(chosen.name, {})
        return ToolContext(self._own_sample, kwargs, self.seed, self.messages, self.made)


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

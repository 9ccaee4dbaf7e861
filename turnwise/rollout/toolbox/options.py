"""What a run sets for one tool: its time, how many calls at once and per second, how much of its reply is shown."""

import asyncio
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from turnwise.config.choices import Keep, Lifecycle
from turnwise.config.knobs import at_least, duration, kind_of, knob, more_than, problems
from turnwise.errors import ConfigError, PluginError
from turnwise.errors.nearest_name import unknown
from turnwise.rollout.tools.tool import Tool, ToolContext, ToolSession
from turnwise.system import resources, time_budget
from turnwise.types import JsonSchema

REPLY = "{output}"
"""Where a reply stands in its frame."""


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """Options of one tool, from `rollout.tool_options` or its YAML entry. Null: the tool's own, or the run's."""

    timeout: float | None = knob(None, duration())
    """Seconds for one call."""
    concurrency: int | None = knob(None, at_least(1))
    """Calls under way at once, of all episodes."""
    rate_limit: float | None = knob(None, more_than(0, 1e6))
    """Calls begun per second, of all episodes; waiting for one's turn is not the episode's time."""
    max_reply_tokens: int | None = knob(None, at_least(1))
    """Tokens of a reply that the model is shown."""
    keep: Keep | None = None
    """Which part of a longer one."""
    lifecycle: Lifecycle | None = None
    """How long an instance of a tool class lives."""
    size: str | None = None
    """WIDTHxHEIGHT, in pixels, of every image it gives the model, such as 64x64."""

    env_names: list[str] | None = None
    """Environments (the column `env_name`) whose rows alone have this tool; null gives it to all rows."""
    frame: str | None = None
    """Words that its replies are shown in, such as <sandbox_output>{output}</sandbox_output>, inside the template's."""

    @property
    def around(self) -> tuple[str, str]:
        """What `frame` has before a reply and after it, its images included."""
        before, _, after = (self.frame or REPLY).partition(REPLY)
        return before, after

    @property
    def image_size(self) -> tuple[int, int] | None:
        """The option `size` as width and height; None where it is not set."""
        return None if self.size is None else read_size(self.size)

    def over(self, other: "ToolOptions") -> "ToolOptions":
        """These, and the other's where these say nothing."""
        names = [field.name for field in dataclasses.fields(self)]
        chosen = {name: getattr(self, name) for name in names}
        return ToolOptions(**{name: getattr(other, name) if v is None else v for name, v in chosen.items()})


OPTIONS = tuple(field.name for field in dataclasses.fields(ToolOptions))
_ENUMS = {"keep": Keep, "lifecycle": Lifecycle}


def read_options(settings: Any, where: str) -> ToolOptions:
    """Options as YAML or the command line writes them; `where` is the key that they stand under."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where} must be options by name, such as {{timeout: 20}}, not {settings!r}")
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in OPTIONS:
            raise ConfigError(f"{where}: {unknown('option', str(key), OPTIONS)}")
        kind = _ENUMS.get(key)
        if kind is not None and value is not None and not isinstance(value, kind):
            if value not in [choice.value for choice in kind]:
                raise ConfigError(f"{where}.{key} must be {kind_of(kind)}, not {value!r}")
            value = kind(value)
        if key == "size" and value is not None:
            value = _size(value, f"{where}.size")
        if key == "env_names" and value is not None and not _are_names(value):
            raise ConfigError(f"{where}.env_names must be a list of the names in the column env_name, not {value!r}")
        if key == "frame" and value is not None and (not isinstance(value, str) or value.count(REPLY) != 1):
            raise ConfigError(f"{where}.frame must be words with {REPLY} in them once, not {value!r}")
        values[key] = value
    options = ToolOptions(**values)
    for key, problem in problems(options, f"{where}."):
        raise ConfigError(f"{key} {problem}")
    return options


def read_size(text: str) -> tuple[int, int] | None:
    """`64x48` as (64, 48); None for what is no size that an image for a model can have."""
    match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text, re.ASCII)
    return None if match is None else (int(match[1]), int(match[2]))


def _size(value: Any, where: str) -> str:
    text = "x".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    if read_size(text) is None:
        raise ConfigError(f"{where} must be WIDTHxHEIGHT in pixels, such as 64x64, at most 9999 each, not {value!r}")
    return text


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


@runtime_checkable
class HasLifecycle(Protocol):
    """A tool that is made of a class: its instances live for one call or for one trajectory."""

    @property
    def lifecycle(self) -> Lifecycle: ...
    def with_lifecycle(self, lifecycle: Lifecycle) -> Tool:
        """The same tool with another one."""
        ...


class RateLimit:
    """So many calls per second, first come, first served; waiting for one's turn is not the episode's time."""

    def __init__(self, per_second: float) -> None:
        self._gap = resources.processes() / per_second
        self._next = 0.0
        """When a call may begin that comes now."""

    async def turn(self) -> None:
        """Wait until a call may begin. Who leaves meanwhile leaves a gap, unless nobody came after."""
        now = time_budget.clock()
        at = max(now, self._next)
        self._next = after = at + self._gap
        if at <= now:
            return
        try:
            with time_budget.waiting():
                await asyncio.sleep(at - now)
        except asyncio.CancelledError:
            self._next = at if self._next == after else self._next
            raise


@dataclass(frozen=True, slots=True)
class ToolWithOptions:
    """A tool and what is set for it; a Toolbox takes the two apart."""

    tool: Tool
    options: ToolOptions
    rate: RateLimit | None
    """Shared by all toolboxes that this one is given to."""

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def schema(self) -> JsonSchema:
        return self.tool.schema

    @property
    def timeout(self) -> float:
        return self.options.timeout or self.tool.timeout

    @property
    def concurrency(self) -> int:
        return self.options.concurrency or self.tool.concurrency

    async def open(self, context: ToolContext) -> ToolSession:
        return await self.tool.open(context)


def with_options(tool: Tool, options: ToolOptions) -> Tool:
    """The tool with these options, over those it has already."""
    if isinstance(tool, ToolWithOptions):
        if (merged := options.over(tool.options)) == tool.options:
            return tool
        tool, options = tool.tool, merged
    if options.lifecycle is not None:
        if not isinstance(tool, HasLifecycle):
            raise PluginError(f"tool {tool.name!r} has no lifecycle: it is not made of a class with create and release")
        tool = tool.with_lifecycle(options.lifecycle)
        options = dataclasses.replace(options, lifecycle=None)  # it has it now
    if options == ToolOptions():
        return tool
    return ToolWithOptions(tool, options, None if options.rate_limit is None else RateLimit(options.rate_limit))


def environments_of(tools: Iterable[Tool]) -> dict[str, list[str]]:
    """By tool the environments whose rows alone have it; a tool that all rows have is not there."""
    limited = {tool.name: tool.options.env_names for tool in tools if isinstance(tool, ToolWithOptions)}
    return {name: names for name, names in limited.items() if names is not None}

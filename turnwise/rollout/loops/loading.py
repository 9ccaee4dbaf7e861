"""Agent loops by name: built in, brought by an extension, of a user's file; options are checked at the start."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from turnwise.config import Config
from turnwise.config.knobs import is_plugin
from turnwise.errors import ConfigError, PluginError
from turnwise.errors.nearest_name import unknown
from turnwise.extensions import named
from turnwise.rollout.plugin_options import keyword_options, read_files
from turnwise.system.plugins import LONGEST_NAME, adapted, load, load_module, names_in, unnamed

if TYPE_CHECKING:
    from turnwise.rollout.conversation import Conversation

_PACKAGE = "turnwise.rollout.loops"
_OPTIONS = "rollout.agent_options"
OWN = " Your own is written as file.py:name."

Loop = Callable[["Conversation"], Awaitable[None]]


@runtime_checkable
class MakesLoop(Protocol):
    """A loop of an extension that needs more than options: it is made for a run, and reads its options itself."""

    def for_run(self, config: Config) -> Loop:
        """The run's loop; ConfigError for a config that it cannot be made of."""
        ...


@runtime_checkable
class RunningLoop(Protocol):
    """A loop with something that is open while the run goes on, such as a server."""

    def running(self) -> AbstractAsyncContextManager[object]:
        """Entered before the first episode and left after the last."""
        ...


@dataclass(frozen=True, slots=True)
class LoopEntry:
    """One loop of a file of loops: where its code is, its options, and whom to name in an error."""

    target: str
    options: dict[str, Any]
    where: str
    folder: Path


class Loops:
    """The agent loops of a run, each made once."""

    def __init__(self, config: Config) -> None:
        self._whole, self._config = config, config.rollout
        self._entries: dict[str, LoopEntry] = read_files(config, "loop_files")
        self._made: dict[str, Loop] = {}
        if self._config.agent_options and self._config.agent is None:
            raise ConfigError("rollout.agent_options needs rollout.agent, which is not set")

    def get(self, agent: str) -> Loop:
        """The loop of a name, with its options filled in. Code is imported only where the config names it."""
        if agent not in self._made:
            self._made[agent] = self._make(agent)
        return self._made[agent]

    def name_of(self, agent: str) -> str:
        """Ours for another name of it, unless the user's files have that; of a file alone, that of its only loop."""
        if agent == self._config.agent and agent.endswith(".py"):
            if len(self._registered) != 1:
                names = ", ".join(self._registered) or "none"
                raise PluginError(f"rollout.agent={agent} must register one agent loop, or name one: {names}")
            return next(iter(self._registered))
        target = named("loops").get(agent, ":")
        if ":" in target or agent in self._entries or agent in self._registered:
            return agent
        return target

    def is_own(self, agent: str) -> bool:
        """Whether the loop is a user's code."""
        entry = self._entries.get(agent)
        if entry is None:
            # Asked for every episode: the folder is only listed for a name that a user's file registers.
            return ":" in agent or (agent in self._registered and agent not in builtin_loops())
        return not entry.target.startswith("turnwise.")

    @functools.cached_property
    def _registered(self) -> dict[str, object]:
        """Loops that the files of rollout.agent and of lists of loops register by name, as an extension knows."""
        places: list[tuple[str, Path | None]] = [(entry.target, entry.folder) for entry in self._entries.values()]
        agent = self._config.agent or ""
        if ":" in agent or agent.endswith(".py"):
            places.append((agent, None))
        registered: dict[str, object] = {}
        for spec, folder in places:
            module = spec if spec.endswith(".py") else spec.rpartition(":" if ":" in spec else ".")[0]
            registered |= adapted("loop_module", load_module(module, "agent loop", near=folder), {}) or {}
        return registered

    def _make(self, agent: str) -> Loop:
        configured = self._config.agent is not None and self.name_of(self._config.agent) == agent
        options = dict(self._config.agent_options) if configured else {}
        if (entry := self._entries.get(agent)) is not None:
            value = load(entry.target, "agent loop", near=entry.folder)
            return as_loop(value, entry.target, {**entry.options, **options}, entry.where)
        if ":" in agent and configured:
            return as_loop(load(agent, "agent loop"), agent, options, _OPTIONS)
        loops = builtin_loops()
        if agent not in loops:
            if agent in self._registered:
                return as_loop(self._registered[agent], agent, options, _OPTIONS)
            names = [*self._entries, *self._registered, *loops]
            if configured or not is_plugin(agent):
                raise PluginError(unknown("agent loop", agent[:LONGEST_NAME], names) + ("" if self._entries else OWN))
            keys = "rollout.agent=...", *(f"{key}=FILE" for key in named("loop_files"))
            raise PluginError(unnamed("agent loop", agent, names, *keys))
        module, _, name = loops[agent].partition(":")
        loop = getattr(import_module(module), name)
        if isinstance(loop, MakesLoop):
            return loop.for_run(replace(self._whole, rollout=replace(self._config, agent_options=options)))
        return as_loop(loop, agent, options, _OPTIONS)


def builtin_loops() -> dict[str, str]:
    """`module:object` of our loops and of those that extensions bring, by name."""
    ours = {name: f"{_PACKAGE}.{name}:{name}" for name in names_in(_PACKAGE) if name != "loading"}
    return {**ours, **{name: target for name, target in named("loops", ours).items() if ":" in target}}


def as_loop(value: Any, spec: str, options: Mapping[str, Any], where: str) -> Loop:
    """A loop with its options; what is none would only be found out in the first episode."""
    if isinstance(value, functools.partial) and not options:
        return value
    function = value if inspect.isroutine(value) else getattr(value, "__call__", None)  # noqa: B004 (its kind matters)
    if isinstance(value, type) or not inspect.iscoroutinefunction(function):
        foreign: Loop | None = adapted("loop", value, {"name": spec, "options": dict(options)})
        if foreign is not None:
            return foreign
        raise PluginError(f"agent loop {spec!r} must be written as: async def {spec.rpartition(':')[2]}(chat)")
    values = keyword_options(value, options, f"agent loop {spec}", where)
    try:
        inspect.signature(value).bind(None, **options)
    except TypeError as error:
        problem = f"agent loop {spec!r} must take the conversation, and options by keyword only: {error}"
        raise PluginError(problem) from error
    loop: Loop = functools.partial(value, **values) if values else value
    return loop

"""Agent loops by name: built in, `module:name`, or of a verl-style YAML file; options are checked at the start."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from turnwise.config import RolloutConfig
from turnwise.errors import ConfigError, PluginError, unknown
from turnwise.knobs import is_plugin
from turnwise.plugins import LONGEST_NAME, builtin, load, load_module, names_in, unnamed
from turnwise.rollout.verl_loops import registered_in, verl_loop
from turnwise.strict_yaml import read_yaml

if TYPE_CHECKING:
    from turnwise.rollout.conversation import Conversation

_PACKAGE = "turnwise.rollout.agent_loops"
VERL_NAMES = {"single_turn_agent": "single_turn", "tool_agent": "tool_calling"}
TARGET = "_target_"
OWN = " Your own is written as module:name."

Loop = Callable[["Conversation"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of the YAML file."""

    target: str
    kwargs: dict[str, Any]
    where: str
    folder: Path


class Loops:
    """The agent loops of a run, each made once."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._entries = {} if config.agents_file is None else read_agents(Path(config.agents_file))
        self._made: dict[str, Loop] = {}
        if config.agent_options and config.agent is None:
            raise ConfigError("rollout.agent_options are those of rollout.agent, which is not set")

    def get(self, agent: str) -> Loop:
        """The loop of a name, with its options filled in. Code is imported only where the config names it."""
        if agent not in self._made:
            self._made[agent] = self._make(agent)
        return self._made[agent]

    def name_of(self, agent: str) -> str:
        """Ours for a name of verl's, unless the user's files have it; of a file alone, that of its only class."""
        if agent == self._config.agent and agent.endswith(".py"):
            if len(self._registered) != 1:
                found = ", ".join(self._registered) or "none"
                raise PluginError(f"rollout.agent={agent} must register one agent loop, or name one: {found}")
            return next(iter(self._registered))
        if agent in self._entries or (agent in VERL_NAMES and agent in self._registered):
            return agent
        return VERL_NAMES.get(agent, agent)

    def is_own(self, agent: str) -> bool:
        """Whether the loop is a user's code."""
        entry = self._entries.get(agent)
        if entry is None:
            # Asked for every episode: the folder is only listed for a name that verl's register knows.
            return ":" in agent or (agent in self._registered and agent not in names_in(_PACKAGE))
        return not entry.target.startswith("turnwise.")

    @functools.cached_property
    def _registered(self) -> dict[str, type]:
        """Classes that verl's @register names in the files of rollout.agent and rollout.agents_file."""
        places: list[tuple[str, Path | None]] = [(one.target, one.folder) for one in self._entries.values()]
        agent = self._config.agent or ""
        if ":" in agent or agent.endswith(".py"):
            places.append((agent, None))
        found: dict[str, type] = {}
        for spec, folder in places:
            place = spec if spec.endswith(".py") else spec.rpartition(":" if ":" in spec else ".")[0]
            found |= registered_in(load_module(place, "agent loop", near=folder))
        return found

    def _make(self, agent: str) -> Loop:
        configured = self._config.agent is not None and self.name_of(self._config.agent) == agent
        options = dict(self._config.agent_options) if configured else {}
        if (entry := self._entries.get(agent)) is not None:
            found = load(entry.target, "agent loop", near=entry.folder)
            return _filled(found, entry.target, {**entry.kwargs, **options}, entry.where)
        if ":" in agent and configured:
            return _filled(load(agent, "agent loop"), agent, options, "rollout.agent_options")
        if agent not in names_in(_PACKAGE) or agent in VERL_NAMES:
            if agent in self._registered:
                return _filled(self._registered[agent], agent, options, "rollout.agent_options")
            known = [*self._entries, *self._registered, *names_in(_PACKAGE)]
            if configured or not is_plugin(agent):
                raise PluginError(unknown("agent loop", agent[:LONGEST_NAME], known) + ("" if self._entries else OWN))
            raise PluginError(unnamed("agent loop", agent, known, "rollout.agent=...", "rollout.agents_file=FILE"))
        module = vars(builtin(_PACKAGE, agent, "agent loop"))
        # One that needs more than options is made for a run, from its config, and may read its options itself.
        found = (
            module["loop_of"](replace(self._config, agent_options=options)) if "loop_of" in module else module[agent]
        )
        if "TAKES_OPTIONS" in module:
            made: Loop = found
            return made
        return _filled(found, agent, options, "rollout.agent_options")


def read_agents(path: Path) -> dict[str, _Entry]:
    """Loops by name from verl's YAML: a list of {name, _target_, ...options}."""
    if not path.is_file():
        raise ConfigError(f"rollout.agents_file: no file {path} (from {Path.cwd()})")
    content = read_yaml(path)
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{path}: expected a non-empty list of agent loops, each with a name and a {TARGET}")
    found: dict[str, _Entry] = {}
    for number, given in enumerate(content):
        where = f"{path}[{number}]"
        if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
            raise ConfigError(f"{where}: expected a mapping with a name and a {TARGET}")
        entry = dict(given)
        name, target = entry.pop("name", None), entry.pop(TARGET, None)
        for key, value in (("name", name), (TARGET, target)):
            if value is None:
                close = next((f", not {near}" for near in get_close_matches(key, entry)), "")
                raise ConfigError(f"{where}: it needs {key}{close}")
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{where}: {key} must be text, not {value!r:.80}")
        if name in found:
            raise ConfigError(f"{where}: the name {name!r} is taken")
        found[name] = _Entry(target, entry, where, path.resolve().parent)
    return found


def _filled(found: Any, spec: str, options: Mapping[str, Any], where: str) -> Loop:
    """A loop with its options; a class is one of verl's. Anything else would only be found out in the first episode."""
    if isinstance(found, type):
        return _verl_loop(found, spec, dict(options))
    if isinstance(found, functools.partial) and not options:
        return found
    function = found if inspect.isroutine(found) else getattr(found, "__call__", None)  # noqa: B004 (its kind matters)
    if not inspect.iscoroutinefunction(function):
        raise PluginError(f"agent loop {spec!r} must be written as: async def {spec.rpartition(':')[2]}(chat)")
    parameters = inspect.signature(found).parameters
    known = {name: one for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        for name in options:
            if name not in known:
                problem = unknown("option", name, known) if known else f"unknown option {name!r}: it takes none"
                raise ConfigError(f"{where}: agent loop {spec}: {problem}")
    missing = [name for name, one in known.items() if one.default is one.empty and name not in options]
    if missing:
        raise ConfigError(f"{where}: agent loop {spec} needs the option {missing[0]!r}")
    try:
        inspect.signature(found).bind(None, **options)
    except TypeError as error:
        problem = f"agent loop {spec!r} must take the conversation, and options by keyword only: {error}"
        raise PluginError(problem) from error
    values = _typed(function, spec, options, where)
    checked: Loop = functools.partial(found, **values) if values else found
    return checked


def _typed(function: Any, spec: str, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options as their annotations promise; one that is something else is refused."""
    if not options:
        return {}
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise PluginError(f"agent loop {spec!r}: cannot resolve its annotations: {error}") from error
    values = dict(options)
    for name in options:
        if name in hints:
            try:
                values[name] = TypeAdapter(hints[name]).validate_python(options[name], strict=True)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                raise ConfigError(
                    f"{where}: agent loop {spec}: {name}={options[name]!r:.80} does not fit: {problem}"
                ) from error
    return values


def _verl_loop(kind: type, spec: str, kwargs: dict[str, Any]) -> Loop:
    """A class with `run`, as verl's AgentLoopBase; `rollout/verl_loops.py` knows how to play it."""
    if not callable(getattr(kind, "run", None)):
        raise PluginError(f"agent loop {spec!r} is a class without `run`: write async def loop(chat), or a verl loop")
    return verl_loop(kind, kwargs)

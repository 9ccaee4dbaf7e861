"""The resolved plan: which loop, tools, interaction and scorer each sample gets, decided and shown before step 1."""

import contextlib
import difflib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.config import Config, RolloutConfig
from turnwise.config.sections import value_of
from turnwise.errors import ConfigError, PluginError
from turnwise.extensions import named
from turnwise.rollout.loops.loading import Loop, Loops, RunningLoop
from turnwise.rollout.row_columns import (
    check_needs,
    has_environment,
    row_notices,
    tools_of_column,
    tools_of_environment,
)
from turnwise.rollout.toolbox.loading import builtin_tools
from turnwise.rollout.toolbox.options import environments_of
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.tool import ReadsKwargs
from turnwise.rollout.users.loading import FACTS, Users
from turnwise.system.plugins import LONGEST_NAME
from turnwise.types import Sample

CALLING = "tool_calling"
ONE_TURN = "inferred: no tools, no interaction"
NO_ENVIRONMENT = "inferred: no env_name, and tools have env_names"


@dataclass(frozen=True, slots=True)
class Route:
    """How one kind of sample is rolled out, and why that loop."""

    data_source: str
    agent: str
    why: str
    tools: tuple[str, ...]
    interaction: str | None
    loop: Loop = field(compare=False)
    is_own: bool = False
    """Whether the loop is a user's code."""


@dataclass(frozen=True, slots=True)
class Player:
    """The loop of samples that name none, and the key of an extension that asks for it."""

    loop: str
    key: str
    value: str

    @classmethod
    def of(cls, config: Config) -> "Player | None":
        """The first of the extensions' loops whose key the config sets."""
        keys = ((key, loop, value_of(config, key)) for key, loop in named("players").items())
        return next((cls(loop, key, str(value)) for key, loop, value in keys if value is not None), None)


class Plan:
    """Routes by sample. Making one resolves every name, so a wrong one is found before a model is loaded."""

    def __init__(self, samples: Sequence[Sample], config: Config, toolbox: Toolbox, users: Users) -> None:
        self._config, self._toolbox, self._users = config.rollout, toolbox, users
        self.loops, self._player = Loops(config), Player.of(config)
        self._environments = environments_of(toolbox.shared())
        chosen = [self._find_route(sample) for sample in samples]
        self._routed = {id(sample): (sample, route) for sample, route in zip(samples, chosen, strict=True)}
        """Routes of the run's samples, by identity."""
        self.routes: Counter[Route] = Counter(chosen)
        self.notices = [
            *_notices(self.routes, toolbox, config.rollout, self._player),
            *idle_kwargs(samples, chosen, toolbox),
        ]
        self.notices += row_notices(samples, [route.agent for route in chosen], toolbox)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What loops have open while the run goes on, such as the server of clients; closed on every path."""
        loops = {id(route.loop): route.loop for route in self.routes}
        async with contextlib.AsyncExitStack() as stack:
            for loop in loops.values():
                if isinstance(loop, RunningLoop):
                    await stack.enter_async_context(loop.running())
            yield

    def route(self, sample: Sample) -> Route:
        """Which agent loop, tools and user play one sample, and why."""
        known, route = self._routed.get(id(sample), (None, None))
        if route is not None and known is sample and self.loops.get(route.agent) is route.loop:
            return route
        return self._find_route(sample)

    def _find_route(self, sample: Sample) -> Route:
        tools = self._tools(sample)
        spec = self._users.spec_for(sample)
        if sample.agent is not None:
            agent, why = sample.agent, "named by the row"
        elif self._config.agent is not None:
            agent, why = self._config.agent, "rollout.agent"
        elif self._player is not None:
            agent, why = self._player.loop, f"inferred: {self._player.key} is set"
        elif tools or spec:
            agent, why = (
                CALLING,
                f"inferred: there {'are' if tools else 'is'} "
                + " and ".join(word for word, there in (("tools", tools), ("an interaction", spec)) if there),
            )
        else:
            left_out = self._environments and sample.tools is None and not has_environment(sample)
            agent, why = "single_turn", NO_ENVIRONMENT if left_out else ONE_TURN
        agent = self.loops.name_of(agent)
        loop = self._loop(agent, sample)
        # Rows of tool scripts may have query and ground_truth there, and no user.
        idle = [key for key in sample.info.get("interaction_kwargs", ()) if key not in FACTS]
        if spec is None and idle and (agent == CALLING or why == ONE_TURN):
            raise ConfigError(
                f"sample {sample.id} has interaction_kwargs and names no interaction: set rollout.interaction=NAME"
            )
        if agent == "single_turn":  # one answer: there is nobody to call tools or to be asked again
            if sample.interaction is not None or sample.tools or sample.tools_kwargs:
                raise ConfigError(_instead_of_single_turn(sample, why))
            return Route(sample.data_source, agent, why, (), None, loop)
        if getattr(loop, "brings_tools", False):  # and is its own user
            return Route(sample.data_source, agent, why, (), None, loop)
        check_needs(sample, tools, self._toolbox.tools)
        if spec is not None:
            try:
                self._users.get(spec.name)
            except PluginError as error:
                source = "rollout.interaction" if sample.interaction is None else f"sample {sample.id}"
                raise PluginError(f"{source}: {error}") from error
            if (problem := self._users.unread(spec.name, sample)) is not None:
                raise PluginError(f"sample {sample.id}: {problem}")
        user = spec.name if spec else None
        return Route(sample.data_source, agent, why, tools, user, loop, self.loops.is_own(agent))

    def _tools(self, sample: Sample) -> tuple[str, ...]:
        """The row's selection, or else its column `tools`, or else those of its environment. Agents that bring tools of
        their own are not held to the last two."""
        names = self._toolbox.names_for(sample)
        players = named("players").values()
        brings_own = self._player is not None or sample.agent in players or self._config.agent in players
        if sample.tools is not None or brings_own:
            return names
        chosen = tools_of_column(sample, self._toolbox.common)
        if chosen is None and self._environments:
            chosen = tools_of_environment(sample, names, self._environments)
        return names if chosen is None else chosen

    def _loop(self, agent: str, sample: Sample) -> Loop:
        try:
            return self.loops.get(agent)
        except PluginError as error:
            raise PluginError(f"sample {sample.id}: {error}") from error


def _instead_of_single_turn(sample: Sample, why: str) -> str:
    """What to set for a sample that brings something for more than one turn and would get one."""
    if why == NO_ENVIRONMENT:
        return f"sample {sample.id} has tools_kwargs and no env_name, by which tools with env_names would be its own"
    if why.startswith("inferred"):  # tools_kwargs alone: whatever else it brought would have made another loop
        if sample.tools is not None:
            return f"sample {sample.id} has tools_kwargs and its tool_selection is empty: name the tool there"
        return _unoffered(sample, next(iter(sample.tools_kwargs)), builtin_tools())
    brought = "an interaction" if sample.interaction is not None else "tools" if sample.tools else "tools_kwargs"
    mend = "rollout.agent to null or tool_calling" if why == "rollout.agent" else "the row's agent_name to tool_calling"
    return f"sample {sample.id} has {brought} of its own but its agent is single_turn ({why}); set {mend}"


def _unoffered(sample: Sample, name: str, tools: Iterable[str]) -> str:
    """A row has arguments for a tool that was not configured."""
    name = name[:LONGEST_NAME]
    close = difflib.get_close_matches(name, list(tools), n=1)
    hint = f"offer it with rollout.tools=[FILE.py:{name if name.isidentifier() else 'NAME'}]"
    if close:
        hint = f"offer it with rollout.tools=[{name}]" if close == [name] else f"did you mean {close[0]!r}?"
    return f"sample {sample.id} has tools_kwargs for the tool {name!r}, which is not among rollout.tools: {hint}"


def idle_kwargs(samples: Sequence[Sample], routes: Sequence[Route], toolbox: Toolbox) -> list[str]:
    """tools_kwargs that no tool will read. A tool that nobody knows is refused, and a key that it does not know."""
    idle: Counter[tuple[str, tuple[str, ...]]] = Counter()
    unread: Counter[str] = Counter()
    available = {*toolbox.tools, *builtin_tools()}
    for sample, route in zip(samples, routes, strict=True):
        for name, kwargs in sample.tools_kwargs.items():
            if name not in available:
                raise PluginError(_unoffered(sample, name, available))
            if name not in route.tools:
                idle[name, route.tools] += 1
                continue
            tool = toolbox.tools[name]
            if isinstance(tool, ReadsKwargs) and (problem := tool.kwargs_problem(kwargs)) is not None:
                raise PluginError(f"sample {sample.id}: tools_kwargs.{name}: {problem}")
            unread[name] += _has_unread(kwargs, getattr(tool, "reads_kwargs", True))
    return [
        f"{count} samples have tools_kwargs for {name!r}, which they cannot call; they have "
        f"{', '.join(tools) or 'no tools'}"
        for (name, tools), count in idle.items()
    ] + [f"{count} samples have tools_kwargs for {name!r}, which reads none" for name, count in unread.items() if count]


def _notices(routes: Counter[Route], toolbox: Toolbox, config: RolloutConfig, player: Player | None) -> list[str]:
    """What a person should know before the run: anything configured that some samples will not use."""
    notices = []
    for route, count in routes.items():
        if route.agent == "single_turn" and (toolbox.tools or config.interaction):
            notices.append(
                f"{count} samples of {route.data_source} run single-turn ({route.why}) and use neither the "
                "configured tools nor the interaction"
            )
        elif player is not None and route.agent == player.loop and (toolbox.tools or config.interaction):
            notices.append(
                f"{count} samples of {route.data_source} are played by {player.value} ({route.why}), which brings its "
                "own tools: the configured ones and the interaction are not used"
            )
    if player is not None and all(route.agent != player.loop for route in routes):
        notices.append(f"no sample is played by {player.key}={player.value}: they name other agents")
    used = {name for route in routes for name in route.tools}
    unused = [name for name in toolbox.tools if name not in used]
    if unused:
        notices.append(f"no sample uses the tools {', '.join(unused)}")
    if idle := [name for name in config.tool_options if name not in toolbox.tools]:
        notices.append(f"rollout.tool_options has options for {', '.join(idle)}, which no sample uses")
    return notices


def _has_unread(kwargs: Mapping[str, Any], reads: bool | tuple[str, ...]) -> bool:
    """Whether a row gives a tool what it does not read; a tool may say which `create_kwargs` it does."""
    if isinstance(reads, bool):
        return bool(kwargs) and not reads
    return any(key != "create_kwargs" or not set(value or ()) <= set(reads) for key, value in kwargs.items())

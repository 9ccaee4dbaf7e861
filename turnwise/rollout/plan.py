"""The resolved plan: which loop, tools, interaction and scorer each sample gets, decided and shown before step 1."""

import contextlib
import difflib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.config import RolloutConfig
from turnwise.errors import ConfigError, PluginError
from turnwise.plugins import LONGEST_NAME
from turnwise.rollout.interaction_sessions import FACTS, Interactions
from turnwise.rollout.loop_loading import Loop, Loops
from turnwise.rollout.row_needs import check_repositories, row_notices, tools_of_column
from turnwise.rollout.tool_loading import builtin_tools
from turnwise.rollout.toolbox import Toolbox
from turnwise.rollout.tools.tool import ReadsKwargs
from turnwise.types import Sample

CLIENT, CALLING = "openai_client", "tool_calling"
ONE_TURN = "inferred: no tools, no interaction"


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


class Plan:
    """Routes by sample. Making one resolves every name, so a wrong one is found before a model is loaded."""

    def __init__(self, samples: Sequence[Sample], config: RolloutConfig, toolbox: Toolbox, users: Interactions) -> None:
        self._config, self._toolbox, self._users = config, toolbox, users
        self.loops = Loops(config)
        chosen = [self.route(sample) for sample in samples]
        self.routes: Counter[Route] = Counter(chosen)
        self.notices = [*_notices(self.routes, toolbox, config), *idle_kwargs(samples, chosen, toolbox)]
        self.notices += row_notices(samples, [route.agent for route in chosen], toolbox.tools)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The server of clients is there for a run that has any, and stopped on every path."""
        if all(route.agent != CLIENT for route in self.routes):
            yield
            return
        from turnwise.rollout.client_api.server import client_server

        async with client_server():
            yield

    def route(self, sample: Sample) -> Route:
        """The route of one sample."""
        tools = self._tools(sample)
        spec = self._users.spec_for(sample)
        if sample.agent is not None:
            agent, why = sample.agent, "named by the row"
        elif self._config.agent is not None:
            agent, why = self._config.agent, "rollout.agent"
        elif self._config.client is not None:
            agent, why = CLIENT, "inferred: rollout.client is set"
        elif tools or spec:
            agent, why = (
                CALLING,
                f"inferred: there {'are' if tools else 'is'} "
                + " and ".join(word for word, there in (("tools", tools), ("an interaction", spec)) if there),
            )
        else:
            agent, why = "single_turn", ONE_TURN
        agent = self.loops.name_of(agent)
        loop = self._loop(agent, sample)
        # Rows of verl's tool scripts have query and ground_truth there, and no user.
        idle = [key for key in sample.info.get("interaction_kwargs", ()) if key not in FACTS]
        if spec is None and idle and (agent == CALLING or why == ONE_TURN):
            raise ConfigError(
                f"sample {sample.id} has interaction_kwargs and names no interaction: set rollout.interaction=NAME"
            )
        if agent == "single_turn":  # one answer: there is nobody to call tools or to be asked again
            if sample.interaction is not None or sample.tools or sample.tools_kwargs:
                raise ConfigError(_instead_of_single_turn(sample, why))
            return Route(sample.data_source, agent, why, (), None, loop)
        if agent == CLIENT:  # it brings its own tools, and is its own user
            return Route(sample.data_source, agent, why, (), None, loop)
        check_repositories(sample, tools, self._toolbox.tools)
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
        """The row's selection, or else its column `tools`, which an agent that brings its own tools is not held to."""
        names = self._toolbox.names_for(sample)
        is_client = CLIENT in (sample.agent, self._config.agent) or self._config.client is not None
        if sample.tools is not None or is_client:
            return names
        chosen = tools_of_column(sample, self._toolbox.common)
        return names if chosen is None else chosen

    def _loop(self, agent: str, sample: Sample) -> Loop:
        try:
            return self.loops.get(agent)
        except PluginError as error:
            raise PluginError(f"sample {sample.id}: {error}") from error


def _instead_of_single_turn(sample: Sample, why: str) -> str:
    """What to set for a sample that brings something for more than one turn and would get one."""
    if why.startswith("inferred"):  # tools_kwargs alone: whatever else it brought would have made another loop
        if sample.tools is not None:
            return f"sample {sample.id} has tools_kwargs and its tool_selection is empty: name the tool there"
        return _unoffered(sample, next(iter(sample.tools_kwargs)), builtin_tools())
    brought = "an interaction" if sample.interaction is not None else "tools" if sample.tools else "tools_kwargs"
    mend = "rollout.agent to null or tool_calling" if why == "rollout.agent" else "the row's agent_name to tool_agent"
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
    known = {*toolbox.tools, *builtin_tools()}
    for sample, route in zip(samples, routes, strict=True):
        for name, kwargs in sample.tools_kwargs.items():
            if name not in known:
                raise PluginError(_unoffered(sample, name, known))
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


def _notices(routes: Counter[Route], toolbox: Toolbox, config: RolloutConfig) -> list[str]:
    """What a person should know before the run: anything configured that some samples will not use."""
    notices = []
    for route, count in routes.items():
        if route.agent == "single_turn" and (toolbox.tools or config.interaction):
            notices.append(
                f"{count} samples of {route.data_source} run single-turn ({route.why}) and use neither the "
                "configured tools nor the interaction"
            )
        elif route.agent == CLIENT and (toolbox.tools or config.interaction):
            notices.append(
                f"{count} samples of {route.data_source} are played by {config.client} ({route.why}), which brings its "
                "own tools: the configured ones and the interaction are not used"
            )
    if config.client is not None and all(route.agent != CLIENT for route in routes):
        notices.append(f"no sample is played by rollout.client={config.client}: they name other agents")
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

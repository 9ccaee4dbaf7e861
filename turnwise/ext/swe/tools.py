"""The tools bash, edit and finish: one repository per episode, shared by the three, here or at a server."""

import asyncio
import weakref
from dataclasses import dataclass, field
from typing import Any

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.errors import DataError, EpisodeError, PluginError, ToolError
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.shell.pool import ShellPool
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.ext.swe.actions import ACTIONS, BadAction, check_action
from turnwise.ext.swe.config import SweConfig
from turnwise.ext.swe.remote import RemoteWorkspace, SweClient, open_shells
from turnwise.ext.swe.repository import Instance, LocalWorkspace, read_instance
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.types import JsonSchema, Sample, ToolResult

KEY = "swe"
"""Of extra_info: the sample's repository."""
SPARE_SECONDS = 120.0
"""Between a command's own limit and the tool's: for making the repository, and for looking at what was changed."""


def instance_of(sample: Sample) -> Instance:
    """The repository of a sample; DataError when it names none."""
    extra = sample.info.get("extra_info", {})
    if KEY not in extra:
        raise DataError(f"sample {sample.id}: extra_info.{KEY} is missing: it names the repository")
    return read_instance(extra[KEY], f"sample {sample.id}: extra_info.{KEY}")


@dataclass(slots=True)
class _Open:
    """A repository in use, and how many of the episode's tools use it."""

    workspace: LocalWorkspace | RemoteWorkspace
    sample: Sample
    """Held, because it is known by its identity."""
    users: int = 0


class _Workspaces:
    """What the tools of a run share: the pool or the server, and the repositories by episode."""

    def __init__(self, sandbox: SandboxConfig, url: str | None) -> None:
        self._sandbox, self._url = sandbox, url
        self._place: ShellPool | SweClient | None = None
        self._users = 0
        self._starting = asyncio.Lock()
        self._open: dict[int, _Open] = {}

    async def start(self) -> str:
        async with self._starting:
            self._users += 1
            if self._place is not None:
                return "in the same repository"
            backend = self._place = await open_shells(self._sandbox, self._url).__aenter__()
        report = backend.report
        return "repositories" if report is None else report.text().splitlines()[0]

    async def stop(self) -> None:
        self._users -= 1
        if self._users == 0 and self._place is not None:
            backend, self._place = self._place, None
            await backend.close()

    def enter(self, sample: Sample) -> _Open:
        """The episode's repository; all tools of an episode are given the same sample object."""
        if self._place is None:
            raise EpisodeError("the tools of repositories were not started")
        entry = self._open.get(id(sample))
        if entry is None:
            instance = instance_of(sample)
            backend = self._place
            workspace = (
                LocalWorkspace(backend, instance) if isinstance(backend, ShellPool) else backend.workspace(instance)
            )
            entry = self._open[id(sample)] = _Open(workspace, sample)
        entry.users += 1
        return entry

    async def leave(self, entry: _Open) -> None:
        entry.users -= 1
        if entry.users == 0:
            self._open.pop(id(entry.sample), None)
            await entry.workspace.close()


_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Workspaces]] = weakref.WeakKeyDictionary()


def _shared(sandbox: SandboxConfig, url: str | None) -> _Workspaces:
    """Of the running event loop: tools of the same sandbox share one."""
    here = _SHARED.setdefault(asyncio.get_running_loop(), {})
    return here.setdefault(f"{sandbox} {url}", _Workspaces(sandbox, url))


@dataclass(slots=True)
class WorkspaceTool:
    """One of the three: `WorkspaceTool("bash", "bash")`. It is open from the first `start` to the last `stop`."""

    name: str
    action: str
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    url: str | None = None
    """Of a server of repositories, where this machine has none."""
    concurrency: int = 64
    """The sandbox has its own bound on what runs."""

    @property
    def schema(self) -> JsonSchema:
        description, parameters = ACTIONS[self.action]
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }

    @property
    def timeout(self) -> float:
        return self.sandbox.seconds + SPARE_SECONDS

    def for_run(self, config: Config) -> "WorkspaceTool":
        """The tool in the run's sandbox, or at the server that `swe.url` names."""
        return WorkspaceTool(self.name, self.action, section(config, SandboxConfig), section(config, SweConfig).url)

    def needs(self, sample: Sample) -> str | None:
        """The repository that it works in; without one the first call would end the run."""
        return None if KEY in sample.info.get("extra_info", {}) else f"a repository; extra_info.{KEY} names none"

    async def start(self) -> str:
        """Open the sandbox; what was proven of it is returned for the run's log."""
        return await _shared(self.sandbox, self.url).start()

    async def stop(self) -> None:
        await _shared(self.sandbox, self.url).stop()

    async def open(self, context: ToolContext) -> ToolSession:
        workspaces = _shared(self.sandbox, self.url)
        try:
            return _WorkspaceSession(self, workspaces, workspaces.enter(context.sample))
        except DataError as error:
            raise PluginError(str(error)) from error


@dataclass(slots=True)
class _WorkspaceSession:
    tool: WorkspaceTool
    workspaces: _Workspaces
    entry: _Open

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            check_action(self.tool.action, arguments)
            observation = await self.entry.workspace.act(self.tool.action, arguments)
        except BadAction as error:
            raise ToolError(str(error)) from error
        except SandboxLost as error:
            raise EpisodeError(f"the sandbox failed: {error}") from error
        if observation.failed:
            raise ToolError(observation.text)
        return ToolResult(observation.text, info=observation.facts)

    async def close(self) -> None:
        await self.workspaces.leave(self.entry)


bash = WorkspaceTool("bash", "bash")
edit = WorkspaceTool("edit", "edit")
execute_bash = WorkspaceTool("execute_bash", "bash")
finish = WorkspaceTool("finish", "finish")
str_replace_editor = WorkspaceTool("str_replace_editor", "edit")

"""Tools of MCP servers, by the official client: a process that speaks stdio, or an address that speaks HTTP.

The list of tools is asked for once, when a config is read; a run then holds one connection per server, opened by the
first tool that starts and closed by the last that stops.
"""

import asyncio
import contextlib
import importlib.util
import os
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnwise.errors import ConfigError, EpisodeError, PluginError, ToolError, one_line
from turnwise.errors.nearest_name import unknown
from turnwise.ext.mcp.answers import Incoming, first_problem, read_result
from turnwise.ext.mcp.config import ServerSpec, read_entry
from turnwise.rollout.plugin_options import read_settings
from turnwise.rollout.toolbox.options import OPTIONS, ToolOptions, with_options
from turnwise.rollout.toolbox.schema import check_number
from turnwise.rollout.tools.tool import Tool, ToolContext, ToolSession
from turnwise.types import JsonSchema, ToolResult

if TYPE_CHECKING:
    import mcp
    import mcp.types

T = TypeVar("T")

CONNECT_SECONDS = 30.0
CLOSE_SECONDS = 10.0
STREAM_SECONDS = 300.0
"""How long an answer over HTTP may be silent; a tool's own timeout is what ends a call."""
DEFAULT_TIMEOUT = 60.0
DEFAULT_CONCURRENCY = 16
MOST_PAGES = 100
"""Of a server's list of tools; one that never ends must not hold us."""
_STDERR_CHARS = 400
_KEYS = ("mcp", "tools", "name", "config", "class_name")
VERLS_CLASSES = "verl.tools.mcp_"
"""Their only work is what is done here anyhow."""


class _VerlConfig(BaseModel):
    """The settings under `config` of an entry in verl's tools file."""

    model_config = ConfigDict(extra="forbid")

    type: str = "mcp"
    timeout: float | None = Field(default=None, gt=0)
    rate_limit: float | None = Field(default=None, gt=0)


def open_mcp_tools(entry: Mapping[str, Any], *, near: Path | None = None) -> list[Tool]:
    """The tools that an entry of a tools file offers: {"mcp": {"command": ...}, "tools": ["lookup"]}.

    verl's form has `mcp_servers_config_path` and `tool_selected_list` under `mcp`; `near` is the folder of the file
    that says so. Each server is started, asked for its list and stopped again.
    """
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(unknown("key", str(key), (*_KEYS, *OPTIONS)))
    specs, selected = read_entry(entry, near)
    own_class = entry.get("class_name")
    if own_class is not None and not str(own_class).startswith(VERLS_CLASSES):
        raise PluginError(f"results of MCP tools are read as text and images; {own_class} would not be asked")
    config = read_settings(_VerlConfig, entry.get("config") or {}, "config")
    if importlib.util.find_spec("mcp") is None:
        raise PluginError("tools of an MCP server need the package mcp: pip install 'turnwise[mcp]'")
    tools: list[McpTool] = []
    for name, spec in specs.items():
        server = McpServer(name, spec)
        tools += [McpTool(server, schema_of(tool)) for tool in _in_own_loop(server.list_tools())]
    offered = {tool.name: tool for tool in tools}
    for wanted in selected or ():
        if wanted not in offered:
            raise PluginError(unknown(f"tool of the MCP server {', '.join(specs)}", wanted, offered))
    chosen = tools if selected is None else [offered[wanted] for wanted in selected]
    options = ToolOptions(timeout=config.timeout, rate_limit=config.rate_limit)
    return [with_options(tool, options) for tool in chosen]


def schema_of(tool: "mcp.types.Tool") -> JsonSchema:
    """A tool as the model is told of it: the server's own schema, whole."""
    about = {"name": tool.name, "description": tool.description or tool.title or tool.name}
    return {"type": "function", "function": {**about, "parameters": tool.input_schema}}


@dataclass(slots=True)
class McpTool:
    """One tool of a server, which is the service that all its tools share."""

    reads_kwargs: ClassVar[bool] = False
    service: "McpServer"
    schema: JsonSchema
    timeout: float = DEFAULT_TIMEOUT
    concurrency: int = DEFAULT_CONCURRENCY

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    async def open(self, context: ToolContext) -> ToolSession:
        return _McpSession(self)


@dataclass(slots=True)
class _McpSession:
    tool: McpTool

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return await self.tool.service.call(self.tool.name, arguments)

    async def close(self) -> None:
        return None


@dataclass(slots=True)
class McpServer:
    """One server and the connection that all episodes of a run share."""

    name: str
    spec: ServerSpec
    _users: int = 0
    _link: "_Link | None" = None
    _lost_in_a_row: int = 0
    _reconnects: int = 0

    async def start(self) -> str:
        """Connect; what is worth knowing is returned."""
        self._users += 1
        info = (await self._connected()).ready.result().server_info
        return f"MCP server {self.name}" + (f" ({info.name} {info.version})".replace(" )", ")") if info else "")

    async def stop(self) -> None:
        """Leave when the last user has."""
        self._users -= 1
        if self._users <= 0:
            await self.close()

    async def close(self) -> None:
        """Disconnect; a process that was started is ended."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def list_tools(self) -> list["mcp.types.Tool"]:
        """All that the server offers; it is connected for that and left again."""
        try:
            client = (await self._connected()).ready.result()
            async with asyncio.timeout(CONNECT_SECONDS):  # the client itself would wait for ever
                page = await client.list_tools()
                tools = list(page.tools)
                for _ in range(MOST_PAGES):
                    check_number(len(tools), f"MCP server {self.name}")
                    if page.next_cursor is None:
                        return self._distinct(tools)
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
            raise PluginError(f"MCP server {self.name}: its list of tools has no end")
        except ValidationError as error:
            raise PluginError(f"MCP server {self.name}: its list of tools is wrong: {first_problem(error)}") from error
        except TimeoutError as error:
            raise PluginError(f"MCP server {self.name}: no list of tools after {CONNECT_SECONDS:g} s") from error
        except _protocol_error() as error:
            raise PluginError(f"MCP server {self.name}: {' '.join(error.message.split())}") from error
        finally:
            await self.close()

    def _distinct(self, tools: list["mcp.types.Tool"]) -> list["mcp.types.Tool"]:
        names = Counter(tool.name for tool in tools)
        if "" in names:
            raise PluginError(f"MCP server {self.name}: a tool has no name")
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise PluginError(f"MCP server {self.name}: two tools are called {twice!r:.80}")
        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """One call. A server that went away is connected again by the next one; the call itself is not repeated,
        since it may have been carried out."""
        try:
            link = await self._connected()
        except PluginError as error:
            raise EpisodeError(str(error)) from error
        try:
            result = await link.ready.result().call_tool(name, arguments)
        except (_protocol_error(), RuntimeError, ValidationError) as error:
            if link.over:
                raise await self._lost(link, name) from error
            self._lost_in_a_row = 0
            if isinstance(error, _protocol_error()):
                raise ToolError(" ".join(error.message.split()) or "the tool failed and did not say why") from error
            problem = first_problem(error) if isinstance(error, ValidationError) else one_line(error)
            raise ToolError(f"its result cannot be used: {problem}") from error
        self._lost_in_a_row = 0
        facts: dict[str, Any] = {"reconnects": self._reconnects} if self._reconnects else {}
        return await asyncio.to_thread(read_result, result, facts)

    async def _lost(self, link: "_Link", name: str) -> ToolError | EpisodeError:
        """What a call that got no answer is told. A loss counts once, however many calls were under way."""
        if link is self._link:
            self._link = None
            self._lost_in_a_row += 1
            self._reconnects += 1
            await link.close()
        problem = f"the MCP server {self.name} went away; whether {name} was carried out is not known"
        if self._lost_in_a_row > 1:
            return EpisodeError(f"{problem}; it is the second time in a row")
        return ToolError(f"{problem}. The server is started again for the next call")

    async def _connected(self) -> "_Link":
        """The connection, made when there is none; whoever comes meanwhile waits for the same."""
        link = self._link
        if link is not None and link.over:  # it ended while nobody called
            link, self._reconnects = None, self._reconnects + 1
        if link is None:
            link = self._link = _Link(self.name, self.spec)
        try:
            await link.connected()
        except PluginError:
            if self._link is link:
                self._link = None
            raise
        return link


class _Link:
    """A connection, held by a task of its own: what the client opens must be left by the task that entered it.

    produces: `ready`; waits for: `leave`; whoever awaits `connected` is woken by either outcome.
    """

    def __init__(self, name: str, spec: ServerSpec) -> None:
        self.name = name
        self.spec = spec
        self.ready: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
        self.leave = asyncio.Event()
        self.incoming = Incoming()
        self.task = asyncio.create_task(self._hold())

    @property
    def over(self) -> bool:
        """Whether there was a connection that is no more. The code of an error does not tell: servers give that of a
        closed connection to errors of their own."""
        is_over = self.task.done() or self.incoming.has_ended
        return is_over and self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None

    async def connected(self) -> None:
        """Wait for the client; PluginError says why there is none."""
        await asyncio.wait((self.ready,), timeout=CONNECT_SECONDS)
        if not self.ready.done():
            await self.close()
            raise PluginError(f"MCP server {self.name}: no answer after {CONNECT_SECONDS:g} s")
        self.ready.result()

    async def close(self) -> None:
        """Leave; the client ends the process it started, with bounded waits of its own."""
        self.leave.set()
        if not self.ready.done():
            self.task.cancel()
        await asyncio.wait((self.task,), timeout=CLOSE_SECONDS)

    async def _hold(self) -> None:
        with tempfile.TemporaryFile("w+", errors="replace") as stderr:
            try:
                async with _client(self.spec, stderr, self.incoming) as client:
                    self.ready.set_result(client)
                    await self.leave.wait()
            except (Exception, asyncio.CancelledError) as error:  # whatever a server of the user's brings about
                if not self.ready.done():
                    self.ready.set_exception(PluginError(f"MCP server {self.name}: {_cause(error)}{_tail(stderr)}"))
                    self.ready.exception()  # seen: it is told to whoever waits


@contextlib.asynccontextmanager
async def _client(spec: ServerSpec, stderr: IO[str], incoming: Incoming) -> AsyncIterator["mcp.Client"]:
    """A connected client; what a process says on stderr goes into the file `stderr`."""
    import httpx2  # the client's own
    import mcp
    from mcp.client.sse import sse_client
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    async with contextlib.AsyncExitStack() as stack:
        transport: Any
        if spec.command is not None:
            environment = {**spec.env, **{name: _variable(name) for name in spec.env_from}}
            transport = stdio_client(
                mcp.StdioServerParameters(command=spec.command, args=list(spec.args), env=environment, cwd=spec.cwd),
                stderr,  # type: ignore[arg-type]
            )
        else:
            assert spec.url is not None
            headers = {header: _variable(name) for header, name in spec.headers_env.items()}
            if spec.auth_token is not None:
                headers["Authorization"] = f"Bearer {spec.auth_token}"
            limits = httpx2.Timeout(CONNECT_SECONDS, read=STREAM_SECONDS)
            if spec.transport == "sse":
                transport = sse_client(spec.url, headers)
            else:
                http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=limits))
                transport = streamable_http_client(spec.url, http_client=http)
        yield await stack.enter_async_context(mcp.Client(incoming.of(transport)))


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise PluginError(f"the environment variable {name} is not set")
    return value


def _cause(error: BaseException) -> str:
    return "it was stopped before it answered" if isinstance(error, asyncio.CancelledError) else one_line(error)


def _tail(stderr: IO[str]) -> str:
    """The end of what a process said before it failed."""
    with contextlib.suppress(OSError, ValueError):
        stderr.seek(0)
        text = " ".join(stderr.read()[-_STDERR_CHARS:].split())
        return f"; it said: {text}" if text else ""
    return ""


def _protocol_error() -> "type[mcp.MCPError]":
    from mcp import MCPError

    return MCPError


def _in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run to its end in a thread with a loop of its own: configs are read with and without one running."""
    outcome: list[T] = []
    problems: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # carried over to the caller
            problems.append(error)

    thread = threading.Thread(target=body, name="turnwise-mcp")
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return outcome[0]

"""How an entry of a tools file names MCP servers: one command or address, or verl's JSON file of several."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.errors import ConfigError, one_line
from turnwise.errors.address_passwords import has_userinfo
from turnwise.rollout.plugin_options import read_settings


class ServerSpec(BaseModel):
    """How one server is reached: a `command` to start, or the `url` of one that runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Plain settings of the process, which gets little else of our environment."""
    env_from: tuple[str, ...] = ()
    """Variables of our environment that the process gets too: where its secrets are."""
    cwd: str | None = None
    url: str | None = None
    headers_env: dict[str, str] = Field(default_factory=dict)
    """Headers of every request by the variable that holds each: {"Authorization": "SHOP_TOKEN"}."""
    transport: str = "http"
    """`http` (streamable HTTP) or the older `sse`, for a url."""
    auth_token: str | None = Field(default=None, repr=False)
    """verl's: sent as a bearer token. In an entry of ours name a variable in headers_env instead."""

    @model_validator(mode="after")
    def _one_way(self) -> "ServerSpec":
        if (self.command is None) == (self.url is None):
            raise ValueError("give either a command or a url")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("the url begins with http:// or https://")
        if self.url is not None and has_userinfo(self.url):
            raise ValueError("no name or password in the url: name the variable of a header in headers_env")
        if self.transport not in ("http", "sse"):
            raise ValueError("transport is http or sse")
        return self


def read_entry(entry: Mapping[str, Any], near: Path | None) -> tuple[dict[str, ServerSpec], list[str] | None]:
    """The servers that an entry names, and the tools it chooses of them; None for all."""
    described = entry.get("mcp")
    if not isinstance(described, Mapping):
        raise ConfigError(f"mcp: describe a server as {{command: ..., args: [...]}} or {{url: ...}}, not {described!r}")
    described = dict(described)
    selected = entry.get("tools", described.pop("tool_selected_list", None))
    if selected is not None and (not isinstance(selected, list) or not all(isinstance(name, str) for name in selected)):
        raise ConfigError(f"mcp: the tools to take are a list of names, not {selected!r:.80}")
    path = described.pop("mcp_servers_config_path", None)
    if path is None:
        spec = read_settings(ServerSpec, described, "mcp")
        if spec.auth_token is not None:
            raise ConfigError("mcp: no secrets here: name the variable that holds it, headers_env: {Authorization: X}")
        return {str(entry.get("name") or spec.url or spec.command): spec}, selected
    if described:
        raise ConfigError(f"mcp: {next(iter(described))!r} beside mcp_servers_config_path; keep one of them")
    return _servers_of_file((near or Path()) / str(path), str(path)), selected


def _servers_of_file(path: Path, label: str) -> dict[str, ServerSpec]:
    """verl's JSON file of servers: {"mcpServers": {"name": {"command": ...}}}."""
    file = next(
        (candidate for candidate in (path, Path(label)) if candidate.is_file()), None
    )  # verl: from the current folder
    if file is None:
        raise ConfigError(f"mcp: mcp_servers_config_path {label}: no such file")
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{label}: {one_line(error)}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'{label}: expected {{"mcpServers": {{"name": {{...}}}}}}')
    return {name: read_settings(ServerSpec, settings, f"{label}: {name}") for name, settings in servers.items()}

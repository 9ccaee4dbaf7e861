"""Files of tools: YAML with a list `tools`, in our words or in verl's, each entry with its options.

An entry is one of: a class (`class_name`, `config`, `tool_schema`), a function (`function`, optionally the OpenAI
`schema`), an MCP server (`mcp`; in verl's words a class whose `config` has `type: mcp`), or a built-in tool (`name`).

A source whose tools are known only once it is asked, such as an MCP server, is asked here, while a run is prepared: the
prompts need the schemas. Preparing is synchronous and may itself be called from an event loop, so such a source runs
its client in a thread with a loop of its own, takes the list and disconnects. The tools it returns name what they need
while the run goes on as `service` (`Service.start` and `stop`); tools of one server name the same object, which the
Toolbox starts once before the first episode and stops after the last. `start` connects again in the run's own loop, and
refuses a server that no longer offers what it listed.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from turnwise.config import SandboxConfig
from turnwise.errors import ConfigError, PluginError, TurnwiseError, unknown
from turnwise.plugins import load, load_module
from turnwise.rollout.mcp_tools import open_mcp_tools
from turnwise.rollout.settings import Configurable
from turnwise.rollout.tool_loading import as_tool, load_tool, tool_of_class
from turnwise.rollout.tool_options import OPTIONS, ToolOptions, read_options, with_options
from turnwise.rollout.tools.tool import Tool, tool
from turnwise.rollout.verl_tools import function_tools
from turnwise.strict_yaml import read_yaml

_KINDS = {
    "class_name": ("config", "tool_schema"),
    "function": ("schema",),
    "mcp": ("config", "class_name", "tools"),
    "name": ("config",),
}
_TYPES = ("native", "mcp")
_MCP_CLASSES = ("verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool")
_MCP_CONFIG = ("type", "rate_limit", "timeout")
"""What verl's MCP classes read of their config; here they are options of each tool."""


def is_tool_file(spec: str) -> bool:
    """Whether an entry of `rollout.tools` names a file of tools."""
    return spec.endswith((".yaml", ".yml"))


def load_tools(spec: str, sandbox: SandboxConfig | None = None) -> list[Tool]:
    """What one entry of `rollout.tools` stands for."""
    if is_tool_file(spec):
        return read_tool_file(Path(spec), sandbox)
    if spec.endswith(".py"):  # verl's function_tool_path
        if not (found := function_tools(load_module(spec, "tool"))):
            raise PluginError(f"rollout.tools: {spec} has no @function_tool of verl's: name one as {spec}:function")
        return [*found]
    return [load_tool(spec, sandbox)]


def read_tool_file(path: Path, sandbox: SandboxConfig | None = None) -> list[Tool]:
    """The tools of a file, in its order. Modules are looked for beside it too."""
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"rollout.tools: no file {path} (from {Path.cwd()})")
    content = read_yaml(path)
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a non-empty list under the key 'tools'")
    if stray := [str(key) for key in content if key != "tools"]:
        raise ConfigError(f"{path}: {unknown('key', stray[0], ['tools'])}")
    folder = path.resolve().parent
    return [made for n, entry in enumerate(entries) for made in _read(entry, f"{path}: tools[{n}]", folder, sandbox)]


def _read(entry: Any, where: str, folder: Path, sandbox: SandboxConfig | None) -> list[Tool]:
    kind = _kind(entry, where)
    given = {key: entry[key] for key in entry if key in OPTIONS}
    if kind == "mcp":
        given = {**_verls_options(entry, where), **given}
    options = read_options(given, where)
    try:
        made = _make(kind, entry, options, where, folder, sandbox)
        return [with_options(each, options) for each in made]
    except TurnwiseError as error:
        text = str(error)
        raise type(error)(text if text.startswith(where) else f"{where}: {text}") from error


def _make(
    kind: str, entry: dict[str, Any], options: ToolOptions, where: str, folder: Path, sandbox: SandboxConfig | None
) -> list[Tool]:
    match kind:
        case "mcp":
            return open_mcp_tools(entry, where, near=folder)
        case "name":
            found = load_tool(entry["name"], sandbox)
            if not entry.get("config"):
                return [found]
            if not isinstance(found, Configurable):
                raise ConfigError(f"the tool {found.name} takes no config")
            return [found.configured(entry["config"], folder)]
        case "function":
            target = load(entry["function"], "tool", near=folder)
            schema = entry.get("schema")
            return [as_tool(target) if schema is None else tool(schema=schema)(getattr(target, "function", target))]
    found_class = load(entry["class_name"], "tool", near=folder)
    if not isinstance(found_class, type):
        raise PluginError(f"class_name: {entry['class_name']} is not a class; an object or a function is `function`")
    return [tool_of_class(found_class, entry.get("config") or {}, entry.get("tool_schema"), options)]


def _verls_options(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """The options in verl's words; a class of the user's would be passed over, so it is refused."""
    named = entry.get("class_name", _MCP_CLASSES[0])
    if named not in _MCP_CLASSES:
        raise ConfigError(
            f"{where}: class_name: the tools of an MCP server are called by our own client, and {named} would not be "
            f"used; leave it out, or name one of {', '.join(_MCP_CLASSES)}"
        )
    config = entry.get("config") or {}
    for key in config:
        if key not in _MCP_CONFIG:
            raise ConfigError(f"{where}: config: {unknown('key', str(key), _MCP_CONFIG)}")
    return {key: config[key] for key in _MCP_CONFIG[1:] if key in config}


def _kind(entry: Any, where: str) -> str:
    """Which kind of entry it is; PluginError for one that is none, or has keys that nobody would read."""
    if not isinstance(entry, dict) or not any(key in entry for key in _KINDS):
        keys = entry if isinstance(entry, dict) else ()
        close = next((f", not {key}" for key in keys if get_close_matches(str(key), _KINDS)), "")
        raise ConfigError(f"{where} needs one of {', '.join(_KINDS)}{close}, such as {{function: 'tools.py:look_up'}}")
    config = entry.get("config")
    if config is not None and not isinstance(config, dict):
        raise ConfigError(f"{where}: config must be a mapping, not {config!r}")
    declared = (config or {}).get("type", "native")
    if declared not in _TYPES:
        raise ConfigError(f"{where}: config.type: {unknown('type', str(declared), _TYPES)}")
    kind = "mcp" if declared == "mcp" or "mcp" in entry else next(key for key in _KINDS if key in entry)
    known = (kind, *_KINDS[kind], *OPTIONS)
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where}: {unknown('key', str(key), known)}")
    for key in ("class_name", "function", "name"):
        if key in entry and (not isinstance(entry[key], str) or not entry[key]):
            raise ConfigError(f"{where}: {key} must be text, not {entry[key]!r}")
    for key in ("schema", "tool_schema"):
        if entry.get(key) is not None and not isinstance(entry[key], dict):
            raise ConfigError(f"{where}: {key} must be an OpenAI function schema, not {entry[key]!r}")
    if kind == "mcp" and not isinstance(entry.get("mcp"), dict):
        raise ConfigError(f"{where}: mcp must say which server, as a mapping")
    return kind

"""Files of tools: YAML with a list `tools`, each entry with its options.

An entry is one of: a class (`class_name`, `config`, `tool_schema`), a function (`function`, optionally the OpenAI
`schema`), a built-in tool (`name`), or a kind that an extension brings.

A source whose tools are known only once it is asked, such as a server, is asked here, while a run is prepared: the
prompts need the schemas. Preparing is synchronous and may itself be called from an event loop, so such a source runs
its client in a thread with a loop of its own, takes the list and disconnects. The tools it returns name what they need
while the run goes on as `service` (`Service.start` and `stop`); tools of one server name the same object, which the
Toolbox starts once before the first episode and stops after the last. `start` connects again in the run's own loop, and
refuses a server that no longer offers what it listed.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from turnwise.config import Config
from turnwise.config.strict_yaml import read_yaml
from turnwise.errors import ConfigError, PluginError, TurnwiseError
from turnwise.errors.nearest_name import unknown
from turnwise.extensions import named
from turnwise.rollout.toolbox.loading import as_tool, load_tool, tool_of_class
from turnwise.rollout.toolbox.options import OPTIONS, read_options, with_options
from turnwise.rollout.tools.tool import Configurable, Tool, tool
from turnwise.system.plugins import adapted, load, load_module

_KEYS = {"class_name": ("config", "tool_schema"), "function": ("schema",), "name": ("config",)}
"""The kinds of entries, and what each has beside options."""


def is_tool_file(spec: str) -> bool:
    """Whether an entry of `rollout.tools` names a file of tools."""
    return spec.endswith((".yaml", ".yml"))


def load_tools(spec: str, config: Config | None = None) -> list[Tool]:
    """What one entry of `rollout.tools` stands for."""
    if is_tool_file(spec):
        return read_tool_file(Path(spec), config)
    if spec.endswith(".py"):  # a file alone: all that is marked as a tool in it
        tools: list[Tool] | None = adapted("tool_module", load_module(spec, "tool"), {})
        if not tools:
            raise PluginError(f"rollout.tools: {spec} marks no function as a tool: name one as {spec}:function")
        return tools
    return [load_tool(spec, config)]


def read_tool_file(path: Path, config: Config | None = None) -> list[Tool]:
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
    return [tool for n, entry in enumerate(entries) for tool in _read(entry, f"{path}: tools[{n}]", folder, config)]


def _read(entry: Any, where: str, folder: Path, config: Config | None) -> list[Tool]:
    kind = _kind(entry, where)
    options = read_options({key: entry[key] for key in entry if key in OPTIONS}, where)
    try:
        return [with_options(tool, options) for tool in _make(kind, entry, folder, config)]
    except TurnwiseError as error:
        text = str(error)
        raise type(error)(text if text.startswith(where) else f"{where}: {text}") from error


def _make(kind: str, entry: dict[str, Any], folder: Path, config: Config | None) -> list[Tool]:
    match kind:
        case "name":
            builtin = load_tool(entry["name"], config)
            if not entry.get("config"):
                return [builtin]
            if not isinstance(builtin, Configurable):
                raise ConfigError(f"the tool {builtin.name} takes no config")
            return [builtin.configured(entry["config"], folder)]
        case "function":
            target = load(entry["function"], "tool", near=folder)
            schema = entry.get("schema")
            return [as_tool(target) if schema is None else tool(schema=schema)(getattr(target, "function", target))]
        case "class_name":
            value = load(entry["class_name"], "tool", near=folder)
            if not isinstance(value, type):
                name = entry["class_name"]
                raise PluginError(f"class_name: {name} is not a class; an object or a function is `function`")
            return [tool_of_class(value, entry.get("config") or {}, entry.get("tool_schema"))]
    own = {key: entry[key] for key in entry if key not in OPTIONS}
    tools: list[Tool] = load(named("tool_entries")[kind], "tool")(own, near=folder)
    return tools


def _kind(entry: Any, where: str) -> str:
    """Which kind of entry it is; ConfigError for one that is none, or has keys that nobody would read."""
    brought = named("tool_entries")
    kinds = sorted({*_KEYS, *brought})
    if not isinstance(entry, dict) or not any(key in entry for key in kinds):
        keys = entry if isinstance(entry, dict) else ()
        close = next((f", not {key}" for key in keys if get_close_matches(str(key), kinds)), "")
        raise ConfigError(f"{where} needs one of {', '.join(kinds)}{close}, such as {{function: 'tools.py:look_up'}}")
    if (kind := next((key for key in brought if key in entry), None)) is not None:
        return kind  # which keys it has beside options, its extension knows
    config = entry.get("config")
    if config is not None and not isinstance(config, dict):
        raise ConfigError(f"{where}: config must be a mapping, not {config!r}")
    kind = next(key for key in _KEYS if key in entry)
    readable = (kind, *_KEYS[kind], *OPTIONS)
    for key in entry:
        if key not in readable:
            raise ConfigError(f"{where}: {unknown('key', str(key), readable)}")
    for key in _KEYS:
        if key in entry and (not isinstance(entry[key], str) or not entry[key]):
            raise ConfigError(f"{where}: {key} must be text, not {entry[key]!r}")
    for key in ("schema", "tool_schema"):
        if entry.get(key) is not None and not isinstance(entry[key], dict):
            raise ConfigError(f"{where}: {key} must be an OpenAI function schema, not {entry[key]!r}")
    return kind

"""What the core asks of verl's world: tools, loops, users and their YAML files made ours; nothing heavy is imported
before something is known to be verl's."""

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from turnwise.config.sections import section
from turnwise.config.strict_yaml import read_yaml
from turnwise.errors import ConfigError
from turnwise.errors.nearest_name import unknown
from turnwise.ext.verl.config import VerlConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from turnwise.config import Config
    from turnwise.ext.verl.users import VerlUser
    from turnwise.rollout.conversation import Conversation
    from turnwise.rollout.loops.loading import Loop, LoopEntry
    from turnwise.rollout.tools.tool import Tool
    from turnwise.rollout.users.user import User


_TOOL_METHODS = ("create", "execute", "release")
_TOOL_TYPES = ("native", "mcp")
REGISTRIES = ("verl.tools.function_tool", "turnwise.ext.verl.stand_ins.tools")
"""Modules whose FUNCTION_TOOL_REGISTRY holds what @function_tool saw: the real verl's and ours."""
TARGET = "_target_"


def tool(value: object, entry: Mapping[str, Any]) -> "Tool | None":
    """A class written as verl's BaseTool is, or a function with @function_tool; known by what they have."""
    if not isinstance(value, type):
        if not any(name in sys.modules for name in REGISTRIES):
            return None
        from turnwise.ext.verl.tools import function_tool_of

        return function_tool_of(value)
    if not all(callable(getattr(value, name, None)) for name in _TOOL_METHODS):
        return None
    from turnwise.ext.verl.tools import verl_tool

    config = entry.get("config") or {}
    if (declared := config.get("type", "native")) not in _TOOL_TYPES:
        raise ConfigError(f"config.type: {unknown('type', str(declared), _TOOL_TYPES)}")
    if declared == "mcp":
        raise ConfigError("mcp must say which server, as a mapping")
    return verl_tool(value, config, entry.get("tool_schema"))


def tool_module(module: ModuleType, entry: Mapping[str, Any]) -> "list[Tool] | None":
    """The functions of a file that @function_tool decorates, as verl's function_tool_path takes them."""
    from turnwise.ext.verl.tools import function_tools

    return [*function_tools(module)] or None


def loop(value: object, entry: Mapping[str, Any]) -> "Loop | None":
    """A class with `run`, as verl's AgentLoopBase."""
    if not isinstance(value, type) or not callable(getattr(value, "run", None)):
        return None
    from turnwise.ext.verl.loops import verl_loop

    return verl_loop(value, entry["options"])


def loop_module(module: ModuleType, entry: Mapping[str, Any]) -> dict[str, type] | None:
    """The loop classes of a module by the name that verl's @register gave them."""
    from turnwise.ext.verl.loops import registered_in

    return registered_in(module) or None


def user(value: object, entry: Mapping[str, Any]) -> "User | None":
    """A class or an object with verl's methods of an interaction."""
    kind = value if isinstance(value, type) else type(value)
    if not callable(getattr(kind, "generate_response", None)):
        return None
    from turnwise.ext.verl.users import verl_user

    return verl_user(value, entry["name"], entry["options"])


def loops_of_file(config: "Config") -> "dict[str, LoopEntry]":
    """The loops of verl's YAML file by name: a list of {name, _target_, ...options}."""
    from turnwise.rollout.loops.loading import LoopEntry

    path = Path(section(config, VerlConfig).agents_file or "")
    content = read_yaml(path)
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{path}: expected a non-empty list of agent loops, each with a name and a {TARGET}")
    entries: dict[str, LoopEntry] = {}
    for number, item in enumerate(content):
        where = f"{path}[{number}]"
        if not isinstance(item, dict) or not all(isinstance(key, str) for key in item):
            raise ConfigError(f"{where}: expected a mapping with a name and a {TARGET}")
        options = dict(item)
        name, target = options.pop("name", None), options.pop(TARGET, None)
        for key, value in (("name", name), (TARGET, target)):
            if value is None:
                close = next((f", not {near}" for near in get_close_matches(key, options)), "")
                raise ConfigError(f"{where}: it needs {key}{close}")
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{where}: {key} must be text, not {value!r:.80}")
        if name in entries:
            raise ConfigError(f"{where}: the name {name!r} is taken")
        entries[name] = LoopEntry(target, options, where, path.resolve().parent)
    return entries


def users_of_file(config: "Config") -> "dict[str, Callable[[dict[str, Any]], VerlUser]]":
    """verl's YAML registry of interactions."""
    from turnwise.ext.verl.users import read_registry

    return read_registry(Path(section(config, VerlConfig).interactions_file or ""))


def conversation(config: "Config", entry: Mapping[str, Any]) -> "type[Conversation] | None":
    """The conversation that treats turns, calls and users as verl does, where the config asks for it."""
    if not section(config, VerlConfig).strict:
        return None
    from turnwise.ext.verl.strict_conversation import StrictConversation

    return StrictConversation

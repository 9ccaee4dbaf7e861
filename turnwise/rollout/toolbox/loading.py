"""From a name to a tool: built-in ones, functions, objects and classes of the user's, and what extensions know."""

import reprlib
from pathlib import Path
from typing import Any

from turnwise.config import Config
from turnwise.errors import PluginError
from turnwise.extensions import named
from turnwise.rollout.tools.tool import FunctionTool, MadeForRun, Tool, tool
from turnwise.system.plugins import adapted, builtin, load, names_in
from turnwise.types import JsonSchema

_CONTRACT = ("name", "schema", "timeout", "concurrency", "open")


def load_tool(spec: str, config: Config | None = None, *, near: Path | None = None) -> Tool:
    """A tool by built-in name or module:object; a plain typed function is made into one.

    Those that read the run's config are given it. Modules are looked for in the folder `near` too.
    """
    if ":" in spec or "." in spec:
        value = load(spec, "tool", near=near)
    elif spec in (brought := named("tools", names_in("turnwise.rollout.tools"))):
        value = load(brought[spec], "tool")
    else:
        value = vars(builtin("turnwise.rollout.tools", spec, "tool", leave_out=("tool",), further=brought))[spec]
    loaded = as_tool(value)
    return loaded.for_run(config) if config is not None and isinstance(loaded, MadeForRun) else loaded


def builtin_tools() -> list[str]:
    """The names of the built-in tools, those of extensions included."""
    return sorted({*names_in("turnwise.rollout.tools"), *named("tools")} - {"tool"})


def as_tool(value: object) -> Tool:
    """A tool object as it is, a class as a tool of its instances, what an extension knows, a function as a tool."""
    if isinstance(value, type):
        return tool_of_class(value, {}, None)
    if isinstance(value, FunctionTool) or all(hasattr(value, name) for name in _CONTRACT):
        return value  # type: ignore[return-value]  # it has what the contract asks for
    foreign: Tool | None = adapted("tool", value, {})  # before functions: another package may have decorated it
    if foreign is not None:
        return foreign
    if callable(value):
        return tool(value)
    raise PluginError(f"{reprlib.repr(value)} is not a tool: decorate a typed function with @tool")


def tool_of_class(kind: type, config: dict[str, Any], schema: JsonSchema | None) -> Tool:
    """The tool of a class: a ToolClass of ours, or one that an extension knows."""
    from turnwise.rollout.toolbox.classes import ToolClass, class_tool

    if issubclass(kind, ToolClass):
        return class_tool(kind, config, schema)
    foreign: Tool | None = adapted("tool", kind, {"config": config, "tool_schema": schema})
    if foreign is not None:
        return foreign
    raise PluginError(
        f"{kind!r} is not a tool but a class: derive it from turnwise.ToolClass, name an instance, or decorate a "
        "function with @tool"
    )

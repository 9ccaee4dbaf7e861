"""From a name to a tool: built-in ones, functions, objects and classes of the user's, and verl's classes."""

import reprlib
from pathlib import Path
from typing import Any

from turnwise.config import SandboxConfig
from turnwise.errors import PluginError
from turnwise.plugins import builtin, load, names_in
from turnwise.rollout.tool_classes import ToolClass, class_tool
from turnwise.rollout.tool_options import ToolOptions
from turnwise.rollout.tools.python import PythonTool
from turnwise.rollout.tools.tool import FunctionTool, Tool, tool
from turnwise.rollout.verl_tools import function_tool_of, verl_tool
from turnwise.rollout.workspaces import WorkspaceTool
from turnwise.types import JsonSchema

_VERLS = ("create", "execute", "release")


def load_tool(spec: str, sandbox: SandboxConfig | None = None, *, near: Path | None = None) -> Tool:
    """A tool by built-in name or module:object; a plain typed function is made into one.

    Those that run code get the sandbox. Modules are looked for in the folder `near` too.
    """
    if ":" in spec or "." in spec:
        found = load(spec, "tool", near=near)
    else:
        found = vars(builtin("turnwise.rollout.tools", spec, "tool", leave_out=("tool",)))[spec]
    if sandbox is not None and isinstance(found, PythonTool):
        return PythonTool(found.name, sandbox)  # a run's own: it has a pool to start and to stop
    if sandbox is not None and isinstance(found, WorkspaceTool):
        return WorkspaceTool(found.name, found.action, sandbox)
    return as_tool(found)


def builtin_tools() -> list[str]:
    """Names of the built-in tools."""
    return [name for name in names_in("turnwise.rollout.tools") if name != "tool"]


def as_tool(found: object) -> Tool:
    """A tool object as it is, a function as a FunctionTool, a class with a lifecycle as a tool of its instances."""
    if isinstance(found, FunctionTool):
        return found
    if isinstance(found, type):
        return tool_of_class(found, {}, None, ToolOptions())
    if all(hasattr(found, name) for name in ("name", "schema", "timeout", "concurrency", "open")):
        return found  # type: ignore[return-value]
    if (decorated := function_tool_of(found)) is not None:
        return decorated
    if callable(found):
        return function_tool_of(found) or tool(found)
    raise PluginError(f"{reprlib.repr(found)} is not a tool: decorate a typed function with @tool")


def tool_of_class(kind: type, config: dict[str, Any], schema: JsonSchema | None, options: ToolOptions) -> Tool:
    """The tool of a class: a ToolClass of ours, or one of verl's, known by its methods."""
    if issubclass(kind, ToolClass):
        return class_tool(kind, config, schema)
    if all(callable(getattr(kind, name, None)) for name in _VERLS):
        return verl_tool(kind, config, schema, options)
    if callable(getattr(kind, "reset", None)):
        raise PluginError(
            f"{kind!r} looks like a class for TRL's environment_factory (reset, and methods as tools), which is not"
            " taken: derive it from turnwise.ToolClass, where create stands for reset and calc_reward for get_reward"
        )
    raise PluginError(
        f"{kind!r} is not a tool but a class: derive it from turnwise.ToolClass, name an instance, or decorate a "
        "function with @tool"
    )

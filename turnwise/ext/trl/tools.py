"""What is said to a class written for TRL's environment_factory, which is not taken as a tool."""

from collections.abc import Mapping
from typing import Any

from turnwise.errors import PluginError


def tool(value: object, entry: Mapping[str, Any]) -> None:
    """None for what is no such class."""
    if not isinstance(value, type) or not callable(getattr(value, "reset", None)):
        return None
    raise PluginError(
        f"{value!r} looks like a class for TRL's environment_factory (reset, and methods as tools), which is not"
        " taken: derive it from turnwise.ToolClass, where create stands for reset and calc_reward for get_reward"
    )

"""Turnwise: multi-turn, tool-calling reinforcement learning of language-model agents.

The public names load when first used, so `import turnwise` is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.compose import configure as configure
    from turnwise.errors import ToolError as ToolError
    from turnwise.errors import TurnwiseError as TurnwiseError
    from turnwise.eval import evaluate as evaluate
    from turnwise.metrics import Reduction as Reduction
    from turnwise.rollout.interactions.base import BaseInteraction as BaseInteraction
    from turnwise.rollout.tools.tool import ToolContext as ToolContext
    from turnwise.rollout.tools.tool import tool as tool
    from turnwise.task import Task as Task
    from turnwise.types import Message as Message
    from turnwise.types import Role as Role
    from turnwise.types import Sample as Sample
    from turnwise.types import ToolResult as ToolResult
    from turnwise.types import Trajectory as Trajectory

_HOMES = {
    "BaseInteraction": "turnwise.rollout.interactions.base",
    "Message": "turnwise.types",
    "Reduction": "turnwise.metrics",
    "Role": "turnwise.types",
    "Sample": "turnwise.types",
    "Task": "turnwise.task",
    "ToolContext": "turnwise.rollout.tools.tool",
    "ToolError": "turnwise.errors",
    "ToolResult": "turnwise.types",
    "Trajectory": "turnwise.types",
    "TurnwiseError": "turnwise.errors",
    "configure": "turnwise.compose",
    "evaluate": "turnwise.eval",
    "tool": "turnwise.rollout.tools.tool",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""Turnwise: multi-turn, tool-calling reinforcement learning of language-model agents.

The public names load when first used, so `import turnwise` is cheap.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from turnwise.extensions import named

if TYPE_CHECKING:
    from turnwise.config import AlgorithmConfig as AlgorithmConfig
    from turnwise.config import ChatConfig as ChatConfig
    from turnwise.config import Config as Config
    from turnwise.config import DataConfig as DataConfig
    from turnwise.config import EngineConfig as EngineConfig
    from turnwise.config import EvalConfig as EvalConfig
    from turnwise.config import LearnerConfig as LearnerConfig
    from turnwise.config import ModelConfig as ModelConfig
    from turnwise.config import RolloutConfig as RolloutConfig
    from turnwise.config import SamplingConfig as SamplingConfig
    from turnwise.config import ScoringConfig as ScoringConfig
    from turnwise.config import SftConfig as SftConfig
    from turnwise.config import TrackingConfig as TrackingConfig
    from turnwise.config import TrainingConfig as TrainingConfig
    from turnwise.data.task import Task as Task
    from turnwise.data.task_config import configure as configure
    from turnwise.errors import ToolError as ToolError
    from turnwise.errors import TurnwiseError as TurnwiseError
    from turnwise.eval import evaluate as evaluate
    from turnwise.reports.evaluation import EvalReport as EvalReport
    from turnwise.reports.training import TrainReport as TrainReport
    from turnwise.rollout.toolbox.classes import ToolClass as ToolClass
    from turnwise.rollout.tools.tool import Tool as Tool
    from turnwise.rollout.tools.tool import ToolContext as ToolContext
    from turnwise.rollout.tools.tool import tool as tool
    from turnwise.rollout.users.user import Reply as Reply
    from turnwise.rollout.users.user import User as User
    from turnwise.rollout.users.user import UserTurn as UserTurn
    from turnwise.scoring.scorer import Score as Score
    from turnwise.scoring.scorer import Scorer as Scorer
    from turnwise.sft import SftReport as SftReport
    from turnwise.sft import fine_tune
    from turnwise.storage.recorded_run import RecordedRun as RecordedRun
    from turnwise.storage.recorded_run import read as read
    from turnwise.system.metrics import Reduction as Reduction
    from turnwise.train import train as train
    from turnwise.types import Group as Group
    from turnwise.types import Message as Message
    from turnwise.types import Role as Role
    from turnwise.types import Sample as Sample
    from turnwise.types import ToolResult as ToolResult
    from turnwise.types import Trajectory as Trajectory

    sft = fine_tune

_HOMES = {
    "AlgorithmConfig": "turnwise.config",
    "ChatConfig": "turnwise.config",
    "Config": "turnwise.config",
    "DataConfig": "turnwise.config",
    "EngineConfig": "turnwise.config",
    "EvalConfig": "turnwise.config",
    "EvalReport": "turnwise.reports.evaluation",
    "Group": "turnwise.types",
    "LearnerConfig": "turnwise.config",
    "Message": "turnwise.types",
    "ModelConfig": "turnwise.config",
    "RecordedRun": "turnwise.storage.recorded_run",
    "Reduction": "turnwise.system.metrics",
    "Reply": "turnwise.rollout.users.user",
    "Role": "turnwise.types",
    "RolloutConfig": "turnwise.config",
    "Sample": "turnwise.types",
    "SamplingConfig": "turnwise.config",
    "Score": "turnwise.scoring.scorer",
    "Scorer": "turnwise.scoring.scorer",
    "ScoringConfig": "turnwise.config",
    "SftConfig": "turnwise.config",
    "SftReport": "turnwise.sft",
    "Task": "turnwise.data.task",
    "Tool": "turnwise.rollout.tools.tool",
    "ToolClass": "turnwise.rollout.toolbox.classes",
    "ToolContext": "turnwise.rollout.tools.tool",
    "ToolError": "turnwise.errors",
    "ToolResult": "turnwise.types",
    "TrackingConfig": "turnwise.config",
    "TrainReport": "turnwise.reports.training",
    "TrainingConfig": "turnwise.config",
    "Trajectory": "turnwise.types",
    "TurnwiseError": "turnwise.errors",
    "User": "turnwise.rollout.users.user",
    "UserTurn": "turnwise.rollout.users.user",
    "configure": "turnwise.data.task_config",
    "evaluate": "turnwise.eval",
    "read": "turnwise.storage.recorded_run",
    "sft": "turnwise.sft",
    "tool": "turnwise.rollout.tools.tool",
    "train": "turnwise.train",
}
_FUNCTIONS = {"sft": "fine_tune"}
"""Public names that their home calls otherwise."""
__all__ = list(_HOMES)


def __dir__() -> list[str]:
    return [*__all__, *named("names")]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        brought = named("names").get(name)
        if brought is None:
            raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
        module, _, attribute = brought.partition(":")
        return getattr(import_module(module), attribute)
    return getattr(import_module(_HOMES[name]), _FUNCTIONS.get(name, name))


class _Package(ModuleType):
    """`turnwise.train` is the function, also after somebody has imported the module of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

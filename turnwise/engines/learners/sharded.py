"""A learner that several processes share, found through the table: how it is opened, and how its state is read."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from turnwise import extensions
from turnwise.system.plugins import load_module

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.chat.renderer import Renderer
    from turnwise.config import Config
    from turnwise.engines.opener import LearnerParts, OpenLearner, Say

NAME = "sharded"
"""Of the table's learners: the one behind `learner.processes`."""


class ShardedLearners(Protocol):
    """What the module has that the table names."""

    def open_alone(self, config: "Config", renderer: "Renderer", parts: "LearnerParts", say: "Say") -> "OpenLearner":
        """Without a sampler; it must be closed."""
        ...

    def open_beside(
        self, config: "Config", renderer: "Renderer", parts: "LearnerParts", say: "Say"
    ) -> "AbstractAsyncContextManager[OpenLearner]":
        """Beside a sampler of this process, which keeps its GPU."""
        ...

    def read_whole(self, folder: Path) -> "tuple[dict[str, Tensor], dict[str, Any]]":
        """What its processes wrote into a checkpoint, put together."""
        ...


def sharded_learners() -> ShardedLearners:
    """The module that the table names."""
    module: Any = load_module(extensions.named("learners")[NAME], "learner")
    learners: ShardedLearners = module
    return learners

"""What a tracker is, and what it is given: one point per line of metrics.jsonl."""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State


@dataclass(frozen=True, slots=True)
class Point:
    """`Point(step=12, seconds=88.1, tokens=40_960, metrics={"critic/score/mean": 0.41})`; every value is finite."""

    step: int
    seconds: float
    tokens: int
    metrics: dict[str, float]


class Tracker(Protocol):
    """Somewhere to send points. It is called from one thread only, never the run's, and may raise or be slow.

    See trackers/guard.py for who calls it. A step may come in several points (its training, then its evaluation).
    """

    name: str

    def start(self, run: RunDir, config: dict[str, Any], *, resumed_at: int) -> str | None:
        """Open it; the answer is a line for the log, such as where to look.

        `resumed_at` is the last step that a resumed run keeps (later ones are done again), 0 for a new run.
        """

    def log(self, point: Point) -> None:
        """Send one point; when this returns, the point has been written or handed to the library."""

    def finish(self, state: State, reason: str) -> None:
        """Send what is left and close; `state` and `reason` are those of status.json."""


def foreign(*modules: str) -> ModuleType:
    """Import a library's modules; returns the first.

    A mere folder of that name in the current folder (`./wandb` is left behind by wandb itself) is not the library.
    """
    found = [importlib.import_module(module) for module in modules]
    for module in found:
        if module.__file__ is None:
            raise ImportError(f"{module.__name__} is a folder without code here, not the library")
    return found[0]

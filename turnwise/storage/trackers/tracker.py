"""What a tracker is, and what it is given: one point per line of metrics.jsonl."""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from turnwise.errors import ConfigError
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

    An extension's is made as `Class(config)` before the run starts, which imports its library or says what is missing.
    `choose.py` calls it. A step may come in several points (its training, then its evaluation).
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


def foreign(tracker: str, *names: str) -> ModuleType:
    """Import the modules of a tracker's library and return the first; ConfigError says what to install.

    A mere folder of that name in the current folder (some leave one behind themselves) is not the library.
    """
    try:
        modules = [importlib.import_module(name) for name in names]
        for module in modules:
            if module.__file__ is None:
                raise ImportError(f"{module.__name__} is a folder without code here, not the library")
    # A foreign library's import runs its code, and a broken or clashing installation raises all kinds of errors
    # (protobuf: TypeError, numpy: AttributeError); each means that it cannot be used.
    except Exception as error:
        raise ConfigError(
            f"tracking.to={tracker} needs a library that cannot be imported ({type(error).__name__}: {error}); "
            f"install it with: pip install 'turnwise[{tracker}]'"
        ) from error
    return modules[0]

"""The section `trackers`: under which name numbers go to other services."""

from dataclasses import dataclass
from typing import ClassVar

from turnwise.config.knobs import harmless, knob, was
from turnwise.config.marks import may_change, only_watches


@dataclass
class TrackersConfig:
    """Services that a run's numbers are sent to; `tracking.to` chooses among them (docs/ext/trackers.md)."""

    EVERY_KNOB: ClassVar = (
        may_change(),
        only_watches(),
    )

    project: str = knob("turnwise", harmless(), was("tracking.project"))
    """The project in Weights & Biases, the experiment in MLflow. Set it to keep work apart."""

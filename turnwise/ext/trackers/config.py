"""The section `trackers`: under which name numbers go to other services."""

from dataclasses import dataclass

from turnwise.config.knobs import harmless, knob, was


@dataclass
class TrackersConfig:
    """Services that a run's numbers are sent to; `tracking.to` chooses among them (docs/ext/trackers.md)."""

    project: str = knob("turnwise", harmless(), was("tracking.project"))
    """The project in Weights & Biases, the experiment in MLflow. Set it to keep work apart."""

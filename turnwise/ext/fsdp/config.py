"""The section `fsdp`: how long the ranks of a learner may be silent."""

from dataclasses import dataclass

from turnwise.config.knobs import duration, knob, was


@dataclass
class FsdpConfig:
    """A learner over several processes; `learner.processes` says how many (docs/ext/fsdp.md)."""

    hang_seconds: float = knob(1800.0, duration(), was("learner.hang_seconds"))
    """Seconds in which, of several processes, one must come further and each give a sign of life. Else the learner
    hangs and is ended; a pass, a weight, the model read are further. Raise it when reading the model takes longer."""

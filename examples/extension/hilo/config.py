"""The section `hilo` of the config."""

from dataclasses import dataclass

from turnwise.config.knobs import at_least, knob


@dataclass
class HiloConfig:
    """The game of higher or lower."""

    highest: int = knob(100, at_least(2, 1_000_000))
    """Numbers from 1 to this may be guessed. Raise it for longer episodes."""

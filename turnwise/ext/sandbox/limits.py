"""What one session may use."""

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of a session: `Limits(seconds=2)`. Sizes are in bytes, text in characters."""

    seconds: float = 10.0
    """Of one call, on the host's clock; then the code is interrupted and keeps its variables."""
    grace: float = 0.5
    """What an interrupted call may still take before its process is killed and the variables are lost."""
    cpu_seconds: int = 600
    """Of a whole session; a backstop."""
    memory: int = 512 * MIB
    """Beyond what the preloaded packages take."""
    scratch: int = 64 * MIB
    """Of the files in a session's folder together."""
    files: int = 1024
    threads: int = 128
    output: int = 10_000
    """Of each of stdout, stderr and the last value; the middle is left out."""
    images: int = 8
    """Given back by one call."""
    pixels: int = 16_000_000
    """Of the images one call gives back, together."""

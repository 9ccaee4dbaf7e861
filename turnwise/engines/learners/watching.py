"""Whether the processes of a learner come further: what each says of itself, and who is silent too long."""

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

BEAT_SECONDS = 1.0
"""How often a process that works says so."""
KNOB = "learner.hang_seconds"


@dataclass(frozen=True, slots=True)
class Beat:
    """A process's sign of life: how far it is, and at which line."""

    done: int
    """It grows when the process comes further."""
    where: str
    """The line of Python that it is at."""


class _Progress:
    """Of this process."""

    done = 0


def count_progress() -> None:
    """A pass, a weight or a model is done in this process."""
    _Progress.done += 1


def beat(thread: int) -> Beat:
    """What a process whose work is in this thread says of itself."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Beat(_Progress.done, "no line of Python")
    return Beat(_Progress.done, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}")


class HangWatch:
    """Of one call to all processes. Whoever waits for them notes what they say and asks whether they hang.

    The others wait for one that hangs in a collective, so it is the group that must come further: any of them, or one
    that answers. A process that is stopped is silent, and known by that.
    """

    def __init__(self, names: Sequence[str], limit: float) -> None:
        self._names, self._limit, self._further = names, limit, time.monotonic()
        self._heard = [self._further] * len(names)
        self._beats: dict[int, Beat] = {}

    def note(self, number: int, beat: Beat | None) -> None:
        """A process said this of itself; None when it answered."""
        now = self._heard[number] = time.monotonic()
        if beat is None or number not in self._beats or self._beats[number].done != beat.done:
            self._further = now
        if beat is not None:
            self._beats[number] = beat

    def hangs(self, waiting: Collection[int]) -> str | None:
        """What is wrong with those that have not answered yet, if anything is; all that was said must be noted."""
        now = time.monotonic()
        limit = f"{self._limit:g} s ({KNOB})"
        silent = [self._names[number] for number in waiting if now - self._heard[number] > self._limit]
        if silent:
            return f"{', '.join(silent)} has given no sign of life for {limit}"
        if now - self._further > self._limit:
            places = [f"{self._names[n]} is at {self._beats[n].where}" for n in waiting if n in self._beats]
            return f"no process has made progress for {limit}: {', '.join(places)}"
        return None

"""Whether the ranks of a learner come further: what each says of itself while it works, and who is silent too long."""

import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

BEAT_SECONDS = 1.0
"""How often a rank that works says so."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's sign of life: how far it is, and at which line."""

    done: int
    """It grows when the rank comes further."""
    where: str
    """The line of Python that it is at."""


class _Progress:
    """Of the one rank of this process."""

    done = 0


def count_progress() -> None:
    """A pass, a weight or a model is done in this process."""
    _Progress.done += 1


def beat(thread: int) -> Beat:
    """What a rank that works in this thread of this process says of itself."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Beat(_Progress.done, "no line of Python")
    return Beat(_Progress.done, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}")


class RankWatch:
    """Of one call to all ranks. Whoever waits for them notes what they say and asks whether they hang.

    The others wait for a rank that hangs in a collective, so it is the group that must come further: any of them, or
    one that answers. A process that is stopped is silent, and known by that.
    """

    def __init__(self, size: int, limit: float) -> None:
        self._limit, self._further = limit, time.monotonic()
        self._heard = [self._further] * size
        self._beats: dict[int, Beat] = {}

    def note(self, rank: int, beat: Beat | None) -> None:
        """A rank said this of itself; None when it answered."""
        now = self._heard[rank] = time.monotonic()
        if beat is None or rank not in self._beats or self._beats[rank].done != beat.done:
            self._further = now
        if beat is not None:
            self._beats[rank] = beat

    def hangs(self, waiting: Collection[int]) -> str | None:
        """What is wrong with those that have not answered yet, if anything is; all that was said must be noted."""
        now, size = time.monotonic(), len(self._heard)
        limit = f"{self._limit:g} s (fsdp.hang_seconds)"
        silent = [rank for rank in waiting if now - self._heard[rank] > self._limit]
        if silent:
            return f"rank {', '.join(map(str, silent))} of {size} has given no sign of life for {limit}"
        if now - self._further > self._limit:
            places = [f"rank {rank} is at {self._beats[rank].where}" for rank in waiting if rank in self._beats]
            return f"no rank of {size} has made progress for {limit}: {', '.join(places)}"
        return None

"""The trackers of a run: chosen by name and checked before it starts, and kept away from it while it runs."""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from turnwise.config import Config
from turnwise.errors import one_line
from turnwise.extensions import rows
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.tracker import Point, Tracker
from turnwise.system.plugins import load

WAITING = 4096
"""Points a tracker may be behind; with a hundred metrics each that is some 40 MB."""
FAILURES = 3
"""Points lost in a row after which a tracker is switched off."""
LAST_SECONDS = 30.0
"""How long the end of a run waits, for all trackers together."""
LONGEST_PROBLEM = 300
"""Characters of a library's error that are said."""

_End = tuple[State, str]


class Guarded:
    """One tracker and its worker thread.

    The run's thread puts points into the queue and never waits; the worker waits for the queue, is woken by a point or
    by the end, and alone calls the tracker. Every counter has one writer, so none needs a lock. What is worth telling
    goes into `notes`, which the run's thread takes out and says.
    """

    def __init__(self, tracker: Tracker, start: Callable[[], str | None], waiting: int) -> None:
        self.name = tracker.name
        self.notes: deque[str] = deque()
        self._tracker, self._start, self._waiting = tracker, start, waiting
        self._jobs: queue.SimpleQueue[Point | _End] = queue.SimpleQueue()
        self._given = self._dropped = 0  # written by the run's thread, as is:
        self._behind = ""
        self._arrived = self._failed = self._in_a_row = 0  # written by the worker
        self._problem = ""  # the worker's last one
        self._off = self._over = self._abandoned = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Points that are known not to have arrived."""
        return self._given - self._arrived if self._over else self._dropped + self._failed

    def log(self, point: Point) -> None:
        """Hand a point over, or drop and count it when the tracker is off or too far behind."""
        self._given += 1
        if self._off:
            self._dropped += 1
        elif self._jobs.qsize() >= self._waiting:
            self._dropped += 1
            if not self._behind:
                self._behind = f"it was {self._waiting} points behind"
                self.notes.append(f"tracking: {self.name} does not keep up: points are dropped and counted as lost")
        else:
            self._jobs.put(point)

    def end(self, state: State, reason: str) -> None:
        """Tell the worker that nothing more will come."""
        self._jobs.put((state, reason))

    def wait(self, deadline: float) -> None:
        """Wait for the worker until `deadline`; then it is left behind, and what had not arrived is lost."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._over = True
        if self._thread.is_alive():
            self._abandoned = True
            self.notes.append(f"tracking: {self.name} did not finish in time and is left behind")
        if self.lost:
            reasons = "; ".join(reason for reason in (self._behind, self._problem) if reason)
            why = f" ({reasons})" if reasons else ""
            self.notes.append(
                f"tracking: {self.name} lost {self.lost} of {self._given} points{why}; metrics.jsonl has them all"
            )

    def _work(self) -> None:
        try:
            if not self._attempt(self._open, "could not start"):
                self._switch_off()
            started = not self._off
            while isinstance(job := self._jobs.get(), Point):
                self._take(job)
            if started and not self._abandoned:
                self._close(*job)
        finally:
            self._off = True

    def _open(self) -> None:
        line = self._start()
        if line:
            self.notes.append(line)

    def _take(self, point: Point) -> None:
        if self._abandoned or self._off:
            self._failed += 1
        elif self._attempt(lambda: self._tracker.log(point), "failed"):
            self._arrived += 1
            self._in_a_row = 0
        else:
            self._failed += 1
            self._in_a_row += 1
            if self._in_a_row >= FAILURES:
                self._switch_off()

    def _close(self, state: State, reason: str) -> None:
        if not self._attempt(lambda: self._tracker.finish(state, reason), "could not finish"):
            self.notes.append(f"tracking: {self.name} {self._problem}")

    def _attempt(self, act: Callable[[], None], verb: str) -> bool:
        try:
            act()
        # A tracker is a foreign library with a network, a database or a disk behind it: what it may raise is not known,
        # and none of it is a reason to stop training. It is counted and told, so nothing is hidden. (SystemExit would
        # end this thread without a word.)
        except (Exception, SystemExit) as error:
            self._problem = f"{verb}: {one_line(error)[:LONGEST_PROBLEM]}"
            return False
        return True

    def _switch_off(self) -> None:
        self._off = True
        self.notes.append(f"tracking: {self.name} is switched off: it {self._problem}")


class Trackers:
    """All trackers of a run. Nothing here raises because of a tracker, and nothing waits for one but `finish`."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        say: Callable[[str], None],
        *,
        waiting: int = WAITING,
        last_seconds: float = LAST_SECONDS,
    ) -> None:
        self._trackers, self._say = list(trackers), say
        self._waiting, self._last_seconds = waiting, last_seconds
        self._guards: list[Guarded] | None = None
        self._not_finite = 0

    def start(self, run: RunDir, config: dict[str, Any], *, resumed_at: int) -> None:
        """Open them all, each in its own thread; where to look is said when they have told it."""
        if self._guards is not None:
            raise RuntimeError("these trackers were started before")

        def guarded(tracker: Tracker) -> Guarded:
            return Guarded(tracker, lambda: tracker.start(run, config, resumed_at=resumed_at), self._waiting)

        self._guards = [guarded(tracker) for tracker in self._trackers]

    def log(self, point: Point) -> None:
        """Gives a point to all trackers, without values that are not finite."""
        if self._guards is None:
            raise RuntimeError("a point came before the trackers were started")
        clean = self._clean(point)
        for guard in self._guards:
            guard.log(clean)
        self._flush_notes()

    def metrics(self) -> dict[str, float]:
        """How many points each has lost so far, and how many values were not numbers."""
        lost = {f"tracking/{guard.name}/lost": float(guard.lost) for guard in self._guards or ()}
        return lost | {"tracking/not_finite": float(self._not_finite)}

    def finish(self, state: State, reason: str) -> None:
        """Close them; waits at most `last_seconds` and says what was lost. Also right before start and twice."""
        deadline = time.monotonic() + self._last_seconds
        guards, self._trackers = (self._guards or []) if self._trackers else [], []
        for guard in guards:
            guard.end(state, reason)
        for guard in guards:
            guard.wait(deadline)
        self._flush_notes()

    def _clean(self, point: Point) -> Point:
        """The point without values that are not finite, under names that every library can encode."""
        metrics = {
            name.encode("utf-8", "backslashreplace").decode(): float(value)
            for name, value in point.metrics.items()
            if math.isfinite(value)
        }
        missing = [name for name, value in point.metrics.items() if not math.isfinite(value)]
        if missing and not self._not_finite:
            listing = ", ".join(missing[:5])
            self._say(f"tracking: not finite at step {point.step}: {listing}; such values are left out and counted")
        self._not_finite += len(missing)
        return Point(point.step, point.seconds, point.tokens, metrics)

    def _flush_notes(self) -> None:
        for guard in self._guards or ():
            while guard.notes:
                self._say(guard.notes.popleft())


CONSOLE = "console"


def check_trackers(names: Sequence[str], config: Config) -> None:
    """Import what these trackers need; ConfigError says what to install."""
    for name in names:
        if name != CONSOLE:
            _extension_tracker(name, config)


def open_trackers(
    names: Sequence[str], config: Config, *, steps: int, console: Console, say: Callable[[str], None]
) -> Trackers:
    """The trackers of a run of so many steps, checked and not started."""
    from turnwise.storage.trackers.console import ConsoleTracker

    trackers = [
        ConsoleTracker(console, steps) if name == CONSOLE else _extension_tracker(name, config) for name in names
    ]
    return Trackers(trackers, say)


def _extension_tracker(name: str, config: Config) -> Tracker:
    tracker: Tracker = load(rows("trackers", [CONSOLE])[name].place, "tracker")(config)
    return tracker

"""Signs of life of actors, asked for by a thread beside the run: Ray sees a process that is there, also one that stands
still for ever."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WATCH = "watch"
"""The concurrency group of `beat`: a thread of an actor beside those that work, however long their work takes."""
SILENT_SECONDS = 60.0
"""Of an actor whose node may be busy, where learner.hang_seconds is not shorter."""
SHORTEST_PAUSE, LONGEST_PAUSE, PAUSE_SHARE = 0.2, 10.0, 0.1
"""Between two signs of life, as a share of the time after which silence is a loss."""

Silent = Callable[[str], None]
"""Called in the watchdog's thread, with words that say for how long nothing was heard."""


def ask_beat(actor: Any) -> Any:
    """A reference to a sign of life of an actor; the first one comes when a node has room for it."""
    return actor.beat.options(concurrency_group=WATCH).remote()


@dataclass(eq=False, slots=True)
class _Watched:
    actor: Any
    limit: float
    silent: Silent
    ref: Any = None
    """Of the sign of life that was asked for and has not come."""
    since: float | None = None
    """When the first was asked for that has not come."""


class Watchdog:
    """Who is watched is asked again and again until it is left, is gone, or is silent for longer than its limit."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._watched: dict[int, _Watched] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, actor: Any, limit: float, silent: Silent) -> None:
        """Call `silent` once when this actor has given no sign of life for so many seconds from now on.

        It must have given one: before that it may wait for a node with room.
        """
        with self._lock:
            self._watched[id(actor)] = _Watched(actor, limit, silent)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="turnwise-watchdog", daemon=True)
                self._thread.start()

    def leave(self, actor: Any) -> None:
        """Do not ask it any more; one that was never watched is fine."""
        with self._lock:
            self._watched.pop(id(actor), None)

    def stop(self) -> None:
        """Before the cluster is left: a question after that would make Ray start another one."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            began, pause = time.monotonic(), self._pause()
            if self._stopping.wait(pause):
                return
            with self._lock:
                every = list(self._watched.values())
            if time.monotonic() - began > 2 * pause + SHORTEST_PAUSE:  # this process stood still itself
                for watched in every:
                    watched.since = None if watched.since is None else time.monotonic()
            for watched in every:
                self._check(watched)

    def _pause(self) -> float:
        with self._lock:
            limits = [PAUSE_SHARE * watched.limit for watched in self._watched.values()]
        return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, min(limits, default=LONGEST_PAUSE)))

    def _check(self, watched: _Watched) -> None:
        errors, now = self._ray.exceptions, time.monotonic()
        try:
            if watched.ref is None:
                watched.ref, watched.since = ask_beat(watched.actor), watched.since or now
            elif self._ray.wait([watched.ref], timeout=0)[0]:
                ref, watched.ref = watched.ref, None
                self._ray.get(ref)
                watched.since = None
        except errors.ActorUnavailableError:
            pass  # it is asked again, and counts as silent meanwhile
        except errors.RayError:
            self.leave(watched.actor)  # it is gone: whoever calls it hears that
            return
        if watched.since is not None and now - watched.since > watched.limit:
            self.leave(watched.actor)
            watched.silent(f"has given no sign of life for {watched.limit:g} s")

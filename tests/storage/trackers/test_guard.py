"""Trackers that raise, hang or are flooded never disturb the run, and every lost point is counted."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.choose import FAILURES, Trackers
from turnwise.storage.trackers.tracker import Point

LONG = 60.0
"""Seconds that no passing test ever waits."""


class Kept:
    """A tracker that keeps what it gets in memory."""

    name = "kept"

    def __init__(self, line: str | None = None) -> None:
        self.line, self.points, self.ended = line, list[Point](), list[tuple[State, str]]()
        self.threads = set[threading.Thread]()

    def start(self, run: RunDir, config: dict[str, Any], *, resumed_at: int) -> str | None:
        self.threads.add(threading.current_thread())
        self.opened = (run, config, resumed_at)
        return self.line

    def log(self, point: Point) -> None:
        self.threads.add(threading.current_thread())
        self.points.append(point)

    def finish(self, state: State, reason: str) -> None:
        self.threads.add(threading.current_thread())
        self.ended.append((state, reason))


class Failing(Kept):
    """Raises in the named method, in `log` at the given steps or always."""

    name = "failing"

    def __init__(self, where: str, error: BaseException, steps: set[int] | None = None) -> None:
        super().__init__()
        self.where, self.error, self.steps = where, error, steps

    def start(self, run: RunDir, config: dict[str, Any], *, resumed_at: int) -> str | None:
        if self.where == "start":
            raise self.error
        return super().start(run, config, resumed_at=resumed_at)

    def log(self, point: Point) -> None:
        if self.where == "log" and (self.steps is None or point.step in self.steps):
            raise self.error
        super().log(point)

    def finish(self, state: State, reason: str) -> None:
        super().finish(state, reason)
        if self.where == "finish":
            raise self.error


class Hanging(Kept):
    """Waits in the named method until the test lets go."""

    name = "hanging"

    def __init__(self, where: str, gate: threading.Event) -> None:
        super().__init__()
        self.where, self.gate, self.inside = where, gate, threading.Event()

    def _hang(self, where: str) -> None:
        if where == self.where:
            self.inside.set()
            self.gate.wait(LONG)

    def start(self, run: RunDir, config: dict[str, Any], *, resumed_at: int) -> str | None:
        self._hang("start")
        return None

    def log(self, point: Point) -> None:
        self._hang("log")
        super().log(point)

    def finish(self, state: State, reason: str) -> None:
        self._hang("finish")
        super().finish(state, reason)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "a", "train")


def point(step: int, **metrics: float) -> Point:
    return Point(step, step * 1.5, step * 100, metrics or {"loss": 0.5})


def test_points_arrive_whole_in_order_and_from_one_other_thread(run: RunDir) -> None:
    kept, said = Kept("look here"), list[str]()
    trackers = Trackers([kept], said.append)
    trackers.start(run, {"seed": 3}, resumed_at=7)
    points = [point(step) for step in range(20)]
    for each in points:
        trackers.log(each)
    trackers.finish(State.FINISHED, "all done")
    assert kept.points == points
    assert kept.opened == (run, {"seed": 3}, 7) and kept.ended == [(State.FINISHED, "all done")]
    assert said == ["look here"]
    assert len(kept.threads) == 1 and threading.current_thread() not in kept.threads
    assert trackers.metrics() == {"tracking/kept/lost": 0.0, "tracking/not_finite": 0.0}


@pytest.mark.parametrize("error", [RuntimeError("no server\nand more"), SystemExit(3), OSError(28, "No space left")])
def test_a_start_that_raises_switches_it_off_and_the_others_go_on(run: RunDir, error: BaseException) -> None:
    failing, kept, said = Failing("start", error), Kept(), list[str]()
    trackers = Trackers([failing, kept], said.append)
    trackers.start(run, {}, resumed_at=0)
    for step in range(5):
        trackers.log(point(step))
    trackers.finish(State.FINISHED, "")
    assert len(kept.points) == 5 and failing.points == [] and failing.ended == []
    assert trackers.metrics()["tracking/failing/lost"] == 5
    off, lost = said
    assert off.startswith(f"tracking: failing is switched off: it could not start: {type(error).__name__}: ")
    assert "\n" not in off and "lost 5 of 5 points" in lost


def test_repeated_failures_switch_it_off_with_one_note(run: RunDir) -> None:
    failing, said = Failing("log", ValueError("bad name")), list[str]()
    trackers = Trackers([failing], said.append)
    trackers.start(run, {}, resumed_at=0)
    for step in range(50):
        trackers.log(point(step))
    trackers.finish(State.STOPPED, "by a signal")
    assert trackers.metrics()["tracking/failing/lost"] == 50
    assert [line for line in said if "switched off" in line] == [
        "tracking: failing is switched off: it failed: ValueError: bad name"
    ]
    assert failing.ended == [(State.STOPPED, "by a signal")]  # it was started, so it is closed


def test_failures_with_successes_between_are_counted_and_forgiven(run: RunDir) -> None:
    steps = {step for step in range(30) if step % FAILURES}  # never FAILURES in a row
    failing, said = Failing("log", ConnectionError("reset"), steps), list[str]()
    trackers = Trackers([failing], said.append)
    trackers.start(run, {}, resumed_at=0)
    for step in range(30):
        trackers.log(point(step))
    trackers.finish(State.FINISHED, "")
    assert [each.step for each in failing.points] == [step for step in range(30) if step not in steps]
    assert trackers.metrics()["tracking/failing/lost"] == len(steps)
    assert said == [
        f"tracking: failing lost {len(steps)} of 30 points (failed: ConnectionError: reset); metrics.jsonl has them all"
    ]


def test_a_finish_that_raises_is_told(run: RunDir) -> None:
    said = list[str]()
    trackers = Trackers([Failing("finish", OSError("disk full"))], said.append)
    trackers.start(run, {}, resumed_at=0)
    trackers.log(point(1))
    trackers.finish(State.FINISHED, "")
    assert said == ["tracking: failing could not finish: OSError: disk full"]
    assert trackers.metrics()["tracking/failing/lost"] == 0


@pytest.mark.parametrize(("where", "lost"), [("start", 12), ("log", 12), ("finish", 0)])
def test_one_that_hangs_is_left_behind(run: RunDir, gate: threading.Event, where: str, lost: int) -> None:
    hanging, kept, said = Hanging(where, gate), Kept(), list[str]()
    trackers = Trackers([kept, hanging], said.append, last_seconds=1.0)  # the deadline is for both
    trackers.start(run, {}, resumed_at=0)
    for step in range(12):
        trackers.log(point(step))
    trackers.finish(State.FINISHED, "")
    assert len(kept.points) == 12 and kept.ended
    assert said[0] == "tracking: hanging did not finish in time and is left behind"
    assert trackers.metrics()["tracking/hanging/lost"] == lost
    assert any(f"lost {lost} of 12 points" in line for line in said) == bool(lost)


def test_one_left_behind_does_not_write_later(run: RunDir, gate: threading.Event) -> None:
    hanging, before = Hanging("log", gate), set(threading.enumerate())
    trackers = Trackers([hanging], lambda text: None, last_seconds=0.1)
    trackers.start(run, {}, resumed_at=0)
    worker = next(thread for thread in threading.enumerate() if thread not in before)
    for step in range(12):
        trackers.log(point(step))
    assert hanging.inside.wait(LONG)
    trackers.finish(State.FINISHED, "")
    gate.set()
    worker.join(LONG)
    assert [each.step for each in hanging.points] == [0]  # the one it was busy with
    assert hanging.ended == []


def test_a_full_queue_drops_and_counts_and_says_so_once(run: RunDir, gate: threading.Event) -> None:
    hanging, said = Hanging("log", gate), list[str]()
    trackers = Trackers([hanging], said.append, waiting=10, last_seconds=LONG)
    trackers.start(run, {}, resumed_at=0)
    trackers.log(point(0))
    assert hanging.inside.wait(LONG)  # step 0 is out of the queue now
    for step in range(1, 31):
        trackers.log(point(step))
    assert trackers.metrics()["tracking/hanging/lost"] == 20
    assert said == ["tracking: hanging does not keep up: points are dropped and counted as lost"]
    gate.set()
    trackers.finish(State.FINISHED, "")
    assert [each.step for each in hanging.points] == list(range(11))
    assert trackers.metrics()["tracking/hanging/lost"] == 20
    assert "lost 20 of 31 points" in said[-1]


def test_ten_thousand_points_at_once_are_all_accounted_for(run: RunDir) -> None:
    kept = Kept()
    trackers = Trackers([kept], lambda text: None)
    trackers.start(run, {}, resumed_at=0)
    for step in range(10_000):
        trackers.log(point(step))
    trackers.finish(State.FINISHED, "")
    assert len(kept.points) + trackers.metrics()["tracking/kept/lost"] == 10_000
    assert len(kept.points) >= 4096 and [p.step for p in kept.points] == sorted(p.step for p in kept.points)


def test_what_is_not_finite_is_left_out_counted_and_told_once(run: RunDir) -> None:
    kept, said = Kept(), list[str]()
    trackers = Trackers([kept], said.append)
    trackers.start(run, {}, resumed_at=0)
    trackers.log(point(1, loss=math.nan, kl=math.inf, reward=0.5))
    trackers.log(point(2, loss=-math.inf, reward=1.0))
    trackers.finish(State.FINISHED, "")
    assert [each.metrics for each in kept.points] == [{"reward": 0.5}, {"reward": 1.0}]
    assert trackers.metrics()["tracking/not_finite"] == 3
    assert said == ["tracking: not finite at step 1: loss, kl; such values are left out and counted"]


def test_names_that_cannot_be_encoded_are_escaped(run: RunDir) -> None:
    kept = Kept()
    trackers = Trackers([kept], lambda text: None)
    trackers.start(run, {}, resumed_at=0)
    trackers.log(point(1, **{"train/accuracy/\ud800é": 1.0}))
    trackers.finish(State.FINISHED, "")
    assert kept.points[0].metrics == {"train/accuracy/\\ud800é": 1.0}


def test_the_order_of_calls(run: RunDir) -> None:
    kept = Kept()
    trackers = Trackers([kept], lambda text: None)
    with pytest.raises(RuntimeError, match="before the trackers were started"):
        trackers.log(point(1))
    trackers.start(run, {}, resumed_at=0)
    with pytest.raises(RuntimeError, match="started before"):
        trackers.start(run, {}, resumed_at=0)
    trackers.finish(State.FAILED, "first")
    trackers.finish(State.FINISHED, "second")
    assert kept.ended == [(State.FAILED, "first")]
    Trackers([Kept()], lambda text: None).finish(State.FAILED, "before it started")

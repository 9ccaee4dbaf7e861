"""What is written for TensorBoard, read back with TensorBoard's own reader."""

import contextlib
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import Config
from turnwise.errors import StorageError
from turnwise.ext.trackers.tensorboard import TensorboardTracker
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.storage.trackers.choose import Trackers
from turnwise.storage.trackers.tracker import Point

accumulators = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk that takes `size` bytes per file; the same OSError path as a full one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "a", "train")


def opened(run: RunDir, resumed_at: int = 0) -> TensorboardTracker:
    tracker = TensorboardTracker(Config())
    tracker.start(run, {}, resumed_at=resumed_at)
    return tracker


def read(run: RunDir) -> Any:
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of the steps it hides
    found = accumulators.EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    return found.Reload()


def series(run: RunDir, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(run).Scalars(name)]


def test_scalars_are_read_back(run: RunDir) -> None:
    tracker = TensorboardTracker(Config())
    line = tracker.start(run, {"seed": 1}, resumed_at=0)
    for step in (1, 2, 3):
        tracker.log(Point(step, step * 2.0, step * 1000, {"critic/score/mean": step / 4, "val/accuracy/é x": 0.5}))
    tracker.finish(State.FINISHED, "done")
    assert line == f"TensorBoard: tensorboard --logdir {run.path}/tensorboard"
    assert series(run, "critic/score/mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert series(run, "val/accuracy/é x") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert series(run, "progress/tokens") == [(1, 1000.0), (2, 2000.0), (3, 3000.0)]
    assert series(run, "progress/seconds") == [(1, 2.0), (2, 4.0), (3, 6.0)]


def test_a_point_is_on_the_disk_before_the_run_ends(run: RunDir) -> None:
    tracker = opened(run)
    tracker.log(Point(1, 1.0, 1, {"loss": 2.0}))
    assert series(run, "loss") == [(1, 2.0)]
    tracker.finish(State.FINISHED, "")


def test_a_resumed_run_hides_the_steps_done_again(run: RunDir) -> None:
    first = opened(run)
    for step in range(1, 8):
        first.log(Point(step, 0.0, 0, {"loss": 1.0}))
    first.finish(State.STOPPED, "")
    second = opened(run, resumed_at=4)
    for step in range(5, 7):
        second.log(Point(step, 0.0, 0, {"loss": 2.0}))
    second.finish(State.FINISHED, "")
    assert series(run, "loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]


def test_ten_thousand_points(run: RunDir) -> None:
    said = list[str]()
    trackers = Trackers([TensorboardTracker(Config())], said.append, waiting=20_000)
    trackers.start(run, {}, resumed_at=0)
    for step in range(10_000):
        trackers.log(Point(step, 0.0, 0, {"loss": float(step)}))
    trackers.finish(State.FINISHED, "")
    assert trackers.metrics()["tracking/tensorboard/lost"] == 0
    assert series(run, "loss") == [(step, float(step)) for step in range(10_000)]


def test_a_full_disk_loses_only_the_points_that_raised(run: RunDir) -> None:
    tracker = opened(run)
    tracker.log(Point(1, 0.0, 0, {"loss": 1.0}))
    with largest_file(600), pytest.raises((OSError, StorageError)):
        tracker.log(Point(2, 0.0, 0, {f"metric/{number}": 2.0 for number in range(100)}))
    tracker.log(Point(3, 0.0, 0, {"loss": 3.0}))  # there is room again
    tracker.finish(State.FINISHED, "")
    assert series(run, "loss") == [(1, 1.0), (3, 3.0)]
    assert "metric/1" not in read(run).Tags()["scalars"]


def test_a_folder_that_cannot_be_made_switches_it_off(run: RunDir) -> None:
    (run.path / "tensorboard").write_text("in the way")
    said = list[str]()
    trackers = Trackers([TensorboardTracker(Config())], said.append)
    trackers.start(run, {}, resumed_at=0)
    trackers.log(Point(1, 0.0, 0, {"loss": 1.0}))
    trackers.finish(State.FINISHED, "")
    assert "tensorboard is switched off: it could not start: cannot create" in said[0]
    assert trackers.metrics()["tracking/tensorboard/lost"] == 1


def test_torch_is_not_imported() -> None:
    code = "import sys; from turnwise.ext.trackers.tensorboard import TensorboardTracker as Tracker; from turnwise.config import Config; Tracker(Config()); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"

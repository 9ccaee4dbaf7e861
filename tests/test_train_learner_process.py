"""Training with the learner in a process of its own: the numbers of a run in one process, and its end on every path."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from turnwise import configure
from turnwise.engines.learners.process import ProcessLearner
from turnwise.errors import EngineError
from turnwise.reports.training import TrainReport
from turnwise.storage.checkpoints import find_checkpoint
from turnwise.storage.run_dir import RunDir
from turnwise.train import train
from turnwise.training.runs.state import read_state

pytestmark = pytest.mark.long  # tests/engines/test_learner_process.py compares numbers, errors, states and a stop
SMALL = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=3", "training.group_size=4",
    "training.samples=24", "eval.samples=3", "training.eval_every=0", "training.save_every=1", "engine.threads=1",
    "training.steps=2", "sampling.max_tokens=40", "training.max_lag=0", "algorithm.entropy=0.01",
)  # fmt: skip


def run(folder: Path, *overrides: str) -> TrainReport:
    return train(configure(*SMALL, f"runs_dir={folder}", *overrides), console=Console(quiet=True))


def state(report: TrainReport, step: int) -> bytes:
    return (report.run / f"checkpoints/step_{step:06d}/learner.safetensors").read_bytes()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ProcessLearner]:
    """Every learner that a run starts elsewhere."""
    found, opening = list[ProcessLearner](), ProcessLearner.open
    monkeypatch.setattr(ProcessLearner, "open", lambda self: (found.append(self), opening(self))[1])
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_two_places_train_alike_and_either_goes_on(tmp_path: Path, threads: int, started: list[ProcessLearner]) -> None:
    more = (f"engine.threads={threads}", "algorithm.advantage=gae", "algorithm.kl_loss=0.01")
    here, there = run(tmp_path, "run=here", *more), run(tmp_path, "run=there", "learner.place=process", *more)
    assert len(started) == 1 and there.tokens == here.tokens and there.rewards == here.rewards
    assert state(there, 1) == state(here, 1) != state(there, 2) == state(here, 2)
    assert "learner      in a process of its own" in (there.run / "plan.txt").read_text()
    swapped = [
        run(tmp_path, f"run={name}", "resume=auto", "training.steps=3", f"learner.place={place}", *more)
        for name, place in (("here", "process"), ("there", "here"))
    ]
    assert len(started) == 2 and state(swapped[0], 3) == state(swapped[1], 3)
    assert all(learner._group._processes[0].returncode is not None for learner in started)


def test_running_ahead_gives_the_same_where_the_weights_do_not_change(tmp_path: Path) -> None:
    still = ("training.max_lag=1", "learner.lr=0", "training.steps=3")
    here, there = run(tmp_path, "run=here", *still), run(tmp_path, "run=there", "learner.place=process", *still)
    assert there.tokens == here.tokens and there.rewards == here.rewards
    gaps = [
        [json.loads(line).get("actor/entropy") for line in (report.run / "metrics.jsonl").read_text().splitlines()]
        for report in (here, there)
    ]
    assert gaps[0] == gaps[1] and len([gap for gap in gaps[0] if gap is not None]) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_whose_learner_ends_says_so_and_keeps_its_last_checkpoint(
    tmp_path: Path, number: signal.Signals, started: list[ProcessLearner]
) -> None:
    def hit() -> None:
        while not (tmp_path / "run/checkpoints/latest").is_file():
            time.sleep(0.02)
        os.kill(started[0]._group._processes[0].pid, signal.SIGINT)  # Ctrl-C is the run's affair
        os.kill(started[0]._group._processes[0].pid, number)

    hitter = threading.Thread(target=hit)
    hitter.start()
    words = "own process .*died.*SIGKILL" if number is signal.SIGKILL else "own process has given no sign of life"
    with pytest.raises(EngineError, match=words):
        run(
            tmp_path, "run=run", "learner.place=process", "training.steps=100000", "eval.samples=1",
            "learner.hang_seconds=20",
        )  # fmt: skip
    hitter.join()
    assert started[0]._group._processes[0].returncode is not None
    found = find_checkpoint(RunDir.open(tmp_path / "run"), read_state)
    assert found.checkpoint is not None and found.checkpoint.state.progress.step >= 1 and found.passed_over == []


def test_a_stopped_run_ends_with_a_checkpoint_and_no_process(tmp_path: Path, started: list[ProcessLearner]) -> None:
    def stop() -> None:
        while not (tmp_path / "run/checkpoints/latest").is_file():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    report = run(tmp_path, "run=run", "learner.place=process", "training.steps=100000", "eval.samples=1")
    stopper.join()
    assert 1 <= report.steps < 100000 and state(report, report.steps)
    assert started[0]._group._processes[0].returncode is not None

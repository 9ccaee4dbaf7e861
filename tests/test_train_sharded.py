"""Training with the learner in several processes: the rewards of one, resumed by another number, and its deaths."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from turnwise import configure
from turnwise.errors import ConfigError, EngineError
from turnwise.ext.fsdp.rank_group import LocalRanks
from turnwise.reports.training import TrainReport
from turnwise.storage.checkpoints import find_checkpoint
from turnwise.storage.run_dir import RunDir
from turnwise.train import train
from turnwise.training.runs.state import read_state

SMALL = (
    "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=3", "training.group_size=4",
    "training.samples=24", "eval.samples=3", "training.eval_every=0", "training.save_every=1", "engine.threads=1",
    "training.steps=2", "sampling.max_tokens=40", "training.max_lag=0",
)  # fmt: skip


def run(folder: Path, *overrides: str) -> TrainReport:
    return train(configure(*SMALL, f"runs_dir={folder}", *overrides), console=Console(quiet=True))


@pytest.mark.long  # tests/ext/fsdp/test_sharded.py compares numbers, saves at two and goes on at one
def test_two_processes_train_as_one_does_and_either_goes_on(tmp_path: Path) -> None:
    one, two = run(tmp_path, "run=one"), run(tmp_path, "run=two", "learner.processes=2")
    assert two.rewards == one.rewards and len(two.rewards) == 2
    assert two.before == one.before and two.tokens == one.tokens
    plan = (two.run / "plan.txt").read_text()
    assert (
        "learner      2 processes on the CPU (gloo)" in plan and "processes" not in (one.run / "plan.txt").read_text()
    )
    assert (two.run / "checkpoints/step_000002/learner/.metadata").is_file()
    assert (two.run / "checkpoints/step_000002/policy/tokenizer.json").is_file()
    more = run(tmp_path, "run=two", "resume=auto", "training.steps=3", "learner.processes=1")
    assert more.steps == 3 and more.rewards[:2] == one.rewards
    assert (more.run / "checkpoints/step_000003/learner.safetensors").is_file()


@pytest.mark.long
def test_a_run_whose_learner_dies_says_so_and_keeps_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[LocalRanks] = []
    start: Callable[..., None] = LocalRanks.start
    monkeypatch.setattr(LocalRanks, "start", lambda self, setup: (started.append(self), start(self, setup))[1])

    def kill() -> None:
        while not (tmp_path / "run/checkpoints/latest").is_file():
            time.sleep(0.02)
        os.kill(started[0]._processes[1].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineError, match="lost a process .*rank 1 of 2 .*SIGKILL"):
        run(tmp_path, "run=run", "learner.processes=2", "training.steps=100000", "eval.samples=1")
    killer.join()
    assert [process.poll() is None for process in started[0]._processes] == [False, False]
    found = find_checkpoint(RunDir.open(tmp_path / "run"), read_state)
    assert found.checkpoint is not None and found.checkpoint.state.progress.step >= 1 and found.passed_over == []
    assert not list((tmp_path / "run/checkpoints").glob(".*.tmp"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("learner.processes=2", "learner.optimizer=adamw8bit"), "learner.processes=2: learner.optimizer=adamw8bit"),
        (("learner.processes=2", "learner.device=cuda:1"), "takes a GPU each: set learner.device=cuda"),
        (("learner.processes=0",), "learner.processes must be"),
        (("learner.processes=4", "fsdp.replicas=3"), "fsdp.replicas=3 does not divide learner.processes=4"),
        (
            ("learner.processes=4", "fsdp.replicas=2", "fsdp.context_parallel=4"),
            "fsdp.context_parallel=4 does not divide 2, which is learner.processes / fsdp.replicas",
        ),
        (("fsdp.replicas=2",), "fsdp.replicas=2 does not divide learner.processes=1"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_anything_is_written(
    tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(tmp_path / "runs", *overrides)
    assert not (tmp_path / "runs").exists()

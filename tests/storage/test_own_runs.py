"""One's own run is not asked about, and no other run can be made to look like it."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from turnwise import configure
from turnwise.commands.cli import main
from turnwise.config import Config
from turnwise.storage import own_runs
from turnwise.storage.own_runs import is_own
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import write_trajectories
from turnwise.training.runs.resume_config import resume_command
from turnwise.training.runs.run import new_run
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn

QUIET = Console(quiet=True)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """That of a run with a scorer of one's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("mine.py").write_text("async def half(trajectory):\n    return 0.5\n")
    return configure("task=null", "scoring.scorers.default=mine.py:half", "run=first", "board.live=false")


def make(config: Config) -> Path:
    turn = Turn(0, Message(Role.ASSISTANT, "#### 18"), FinishReason.STOP, 0, 1, 1)
    sample = Sample("a", (Message(Role.USER, "6*3?"),), "sums", "18")
    episode = Trajectory(sample, 0, 0, [*sample.prompt, turn.message], [turn], [], StopReason.ANSWERED, 0.0)
    episode.reward = 1.0
    with new_run(config, "eval", QUIET) as run:
        write_trajectories(run.dir.file("eval/step_000000.parquet"), [episode])
    return run.dir.path


def test_ones_own_run_is_scored_again_without_being_asked(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(config)
    assert is_own(RunDir(folder)) and main(["rescore", str(folder)]) == 0
    assert "1 -> 0.5" in capsys.readouterr().out
    assert resume_command("first", config) == "turnwise train run=first resume=auto"


def test_it_is_another_elsewhere_or_with_another_config(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(config)
    copy = shutil.copytree(folder, folder.parent / "sent")
    assert main(["rescore", str(copy)]) == 2 and "--trust-run" in capsys.readouterr().err
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text + "\n")
    assert main(["rescore", str(folder)]) == 2
    (folder / "config.yaml").write_text(text)
    assert main(["rescore", str(folder), "--name", "again"]) == 0
    monkeypatch.chdir(tmp_path)  # where mine.py may be somebody else's
    assert main(["rescore", str(folder)]) == 2


def test_a_mark_that_others_can_write_is_none(config: Config, tmp_path: Path) -> None:
    run = RunDir(make(config))
    marks = tmp_path / "state" / "turnwise" / "own_runs"
    marks.chmod(0o777)
    assert not is_own(run)
    marks.chmod(0o700)
    assert is_own(run)
    shutil.rmtree(marks)
    assert not is_own(run)


def test_a_home_that_cannot_be_written_to_stops_no_run(config: Config, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    assert not is_own(RunDir(make(config)))


def test_old_marks_go(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_runs, "MOST", 1)
    make(config)
    config.run = "second"
    make(config)
    assert len(list((tmp_path / "state" / "turnwise" / "own_runs").iterdir())) == 1

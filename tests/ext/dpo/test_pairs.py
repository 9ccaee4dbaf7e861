"""Where pairs come from: files of two answers and groups of a run; and a whole run that learns them."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise import Message, Sample, configure, evaluate
from turnwise.config import Config
from turnwise.engines.rendering import make_renderer
from turnwise.errors import DataError
from turnwise.ext.dpo.pairs import of_files, of_recorded
from turnwise.sft import fine_tune, preview
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.training.endpoint_episodes import Student
from turnwise.types import Role, Trajectory

QUIET = Console(quiet=True)
SHORT = ("sft.steps=3", "sft.warmup=1", "sft.lr=1e-3", "engine.threads=1", "rollout.tools=[]")
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


ROWS: list[dict[str, Any]] = [
    {"prompt": QUESTION, "chosen": said("5"), "rejected": said("6")},
    {"chosen": [*QUESTION, *said("5")], "rejected": [*QUESTION, *said("7")]},
    {"prompt": "What is 2 + 3?", "chosen": "5", "rejected": "I do not know."},
]


@pytest.fixture(scope="module")
def student() -> Student:
    return Student(make_renderer(configure()), 768, 4096)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(folder: Path, *overrides: str) -> Config:
    return configure(*SHORT, f"runs_dir={folder}", *overrides)


def test_rows_of_three_kinds_are_pairs_and_others_are_counted(tmp_path: Path, student: Student) -> None:
    bad = [
        {"prompt": QUESTION, "chosen": said("5"), "rejected": said("5")},
        {"prompt": QUESTION, "chosen": said("5"), "rejected": None},
        {"prompt": QUESTION, "chosen": said("5"), "rejected": QUESTION},
    ]
    file = write_lines(tmp_path / "pairs.jsonl", ROWS + bad)
    notes: list[str] = []
    pairs = of_files(asked(tmp_path, f"dpo.files=[{file}]"), student, notes.append)
    assert (pairs.read, len(pairs.used), sum(pairs.dropped.values())) == (12, 6, 6)
    assert [entry.sibling for entry in pairs.used] == [0, 1] * 3
    assert {answer.answers[0].visible for answer in pairs.used[::2]} == {"5"}
    assert "chosen and rejected are the same (first: pairs.jsonl row 3)" in pairs.dropped
    assert "rejected: missing (first: pairs.jsonl row 4)" in pairs.dropped
    assert notes[0] == "pairs.jsonl: 6 rows, 3 of them used; read as pairs"


def test_a_run_learns_pairs_is_looked_at_before_and_resumed(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "pairs.jsonl", ROWS)
    saving = ("run=taught", "training.save_every=1", "training.keep=3")
    config = asked(tmp_path, f"dpo.files=[{file}]", *saving)
    assert len(preview(config, console=QUIET).as_json()["first"]) == 3 and not (tmp_path / "taught").exists()
    report = fine_tune(config, console=QUIET)
    assert (report.trajectories, report.used, report.steps) == (6, 6, 3)
    assert report.first_loss == pytest.approx(math.log(2), abs=1e-4)
    assert report.last_loss is not None and report.last_loss < report.first_loss
    lines = [json.loads(line) for line in (report.run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["dpo/accuracy"] == 1.0 and lines[-1]["dpo/margin"] > 0
    for step in (2, 3):
        shutil.rmtree(report.run / "checkpoints" / f"step_00000{step}")
    again = fine_tune(asked(tmp_path, f"dpo.files=[{file}]", *saving, "resume=auto"), console=QUIET)
    # gains are measured from the model that the whole run started from, not from where it was resumed
    assert (again.steps, again.last_loss) == (3, pytest.approx(report.last_loss, abs=1e-5))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups of three: of the first the sibling's number is the reward, of the second all are the same."""
    folder = tmp_path_factory.mktemp("played")

    async def reward(trajectory: Trajectory) -> float:
        return trajectory.sibling / 2 if trajectory.sample.id == "a" else 1.0

    samples = [Sample(name, (Message(Role.USER, f"Say {name}."),), "talks") for name in "ab"]
    config = configure("task=null", "eval.group_size=3", "engine.threads=1", f"runs_dir={folder}", "run=played")
    return evaluate(config, samples=samples, scorer=reward, console=QUIET).run


def test_the_best_and_the_worst_of_a_group_are_a_pair(played: Path, tmp_path: Path, student: Student) -> None:
    recorded = read_trajectories(played / "eval" / "step_000000.parquet")
    pairs = of_recorded(asked(tmp_path, f"dpo.recorded=[{played}]"), student, [].append)
    assert [(entry.sample.id, entry.sibling, entry.reward) for entry in pairs.used] == [("a", 0, 1.0), ("a", 1, 0.0)]
    assert pairs.dropped == {"neither best nor worst of a group by reward": 4} and pairs.read == len(recorded) == 6
    best = next(entry for entry in recorded if entry.sample.id == "a" and entry.sibling == 2)
    assert pairs.used[0].segments[0].token_ids.tolist() == best.segments[0].token_ids.tolist()
    with pytest.raises(DataError, match="no pair in 2 groups of 6 episodes"):
        of_recorded(asked(tmp_path, f"dpo.recorded=[{played}]", "dpo.margin=1"), student, [].append)

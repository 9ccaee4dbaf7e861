"""What a program gives a training: what must come with it, and that a run does not go on without it."""

from pathlib import Path

import pytest
from rich.console import Console

from turnwise import Message, Role, Sample, Trajectory, configure, tool, train
from turnwise.errors import ConfigError, DataError, StorageError
from turnwise.storage.run_dir import RunDir
from turnwise.training.runs.python_arguments import GIVEN, check_given, describe, resume_call, write_given

QUIET = Console(quiet=True)


def samples(count: int) -> list[Sample]:
    return [Sample(f"q{n}", (Message(Role.USER, f"{n}?"),), "mine") for n in range(count)]


@tool
async def look(item: str) -> str:
    """Look something up."""
    return item


async def score(trajectory: Trajectory) -> float:
    return 1.0


def test_given_samples_are_checked_like_those_of_files(tmp_path: Path) -> None:
    config = configure("task=null", "training.groups=4", f"runs_dir={tmp_path}/runs")
    with pytest.raises(DataError, match="give eval_samples too"):
        train(config, samples=samples(4), scorer=score, console=QUIET)
    with pytest.raises(DataError, match=r"a step of 4 samples cannot be made from 3"):
        train(config, samples=samples(3), eval_samples=samples(1), scorer=score, console=QUIET)
    with pytest.raises(DataError, match="another sample has the id"):
        train(config, samples=samples(4) + samples(1), eval_samples=samples(1), scorer=score, console=QUIET)
    assert not (tmp_path / "runs").exists()


def test_a_run_goes_on_only_with_what_it_was_given(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    given = describe(samples=samples(20), eval_samples=samples(12), tools=[look], scorer=score, interaction=None)
    assert given == {"samples": "20", "eval_samples": "12", "tools": "look", "scorer": "score"}
    write_given(run, given)
    check_given(run, {**given, "samples": "19", "eval_samples": "9"}, eval_files=())
    for other in ({}, {**given, "scorer": "another"}, {key: given[key] for key in ("samples", "eval_samples")}):
        with pytest.raises(ConfigError, match="was given samples=20, .* resume it in Python"):
            check_given(run, other, eval_files=())
    assert resume_call("a", run) == (
        'turnwise.train(turnwise.configure(..., "run=a", "resume=auto"), '
        "samples=..., eval_samples=..., tools=..., scorer=...)"
    )
    (tmp_path / GIVEN).write_text("{")
    with pytest.raises(StorageError, match="not valid JSON"):
        check_given(run, given, eval_files=())


def test_a_run_that_was_given_nothing_takes_nothing_later(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_given(run, {})
    check_given(run, {}, eval_files=())
    assert list(tmp_path.iterdir()) == [] and resume_call("a", run) is None
    with pytest.raises(ConfigError, match="is now given scorer=score: resume it without"):
        check_given(run, describe(scorer=score), eval_files=())

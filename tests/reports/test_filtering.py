"""Filtering by measured difficulty: counts by hand, rows as they were, nothing overwritten."""

import argparse
from pathlib import Path

import pytest

from turnwise.commands import filter as command
from turnwise.data.loader import load_samples
from turnwise.errors import ConfigError, DataError, StorageError
from turnwise.reports.filter import Sieve, measure, trajectory_files
from turnwise.storage.trajectories.files import write_trajectories
from turnwise.types import Message, Role, Sample, StopReason, Trajectory


def tries(name: str, rewards: str, prompt: str = "x") -> list[Trajectory]:
    """`tries("easy", "1101f")`: one episode per letter; f failed."""
    sample = Sample(name, (Message(Role.USER, prompt),), "d", "7", info={"extra_info": {"index": 1}})
    made = []
    for sibling, letter in enumerate(rewards):
        trajectory = Trajectory(sample, sibling, 0, [], [], [], StopReason.ANSWERED, 0.0)
        trajectory.failure = "broken" if letter == "f" else None
        trajectory.reward = None if letter == "f" else float(letter)
        made.append(trajectory)
    return made


RUN = [*tries("all", "11111111", "q0"), *tries("most", "11111110", "q1"), *tries("half", "1f01f010", "q2"),
       *tries("none", "00000000", "q3"), *tries("broken", "ffffffff", "q4"), *tries("rare", "11", "q5")]  # fmt: skip


def names(found: list[object]) -> list[str]:
    return [one.sample.id for one in found]  # type: ignore[attr-defined]


def test_the_papers_filter_drops_what_is_right_in_more_than_nine_of_ten_tries() -> None:
    found = Sieve(most=0.9).sort(measure(RUN))
    assert names(found.too_easy) == ["all", "rare"] and found.too_hard == []
    assert names(found.kept) == ["most", "half", "none", "broken"] and found.unmeasured == 1


def test_both_ends_and_the_number_of_tries() -> None:
    found = Sieve(0.1, 0.9, min_tries=4).sort(measure(RUN))
    assert names(found.too_easy) == ["all"] and names(found.too_hard) == ["none"]
    assert names(found.kept) == ["most", "half", "broken", "rare"] and found.unmeasured == 2


def test_failed_episodes_are_no_tries_and_limits_belong_to_the_kept() -> None:
    (half,) = (one for one in measure(RUN) if one.sample.id == "half")
    assert (half.tries, half.right, half.accuracy) == (6, 3, 0.5)
    assert names(Sieve(0.5, 0.5).sort([half]).kept) == ["half"]


@pytest.mark.parametrize("bad", [(0.5, 0.4, 1), (-0.1, 1.0, 1), (0.0, 1.1, 1), (0.0, 1.0, 0)])
def test_a_sieve_that_cannot_be_is_refused(bad: tuple[float, float, int]) -> None:
    with pytest.raises(ConfigError):
        Sieve(*bad)


def test_one_id_for_two_samples_is_refused() -> None:
    with pytest.raises(DataError, match="two different samples have the id 'a'"):
        measure([*tries("a", "1", "x"), *tries("a", "1", "y")])


def run_dir(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_trajectories(folder / file, RUN)
    (folder / "config.yaml").write_text("task: null\n")
    return folder


def test_held_out_samples_of_a_training_run_are_not_looked_at(tmp_path: Path) -> None:
    training = run_dir(tmp_path / "t", "trajectories/step_000000.parquet", "eval/step_000000.parquet")
    evaluated = run_dir(tmp_path / "e", "eval/step_000000.parquet")
    found = [str(path.relative_to(tmp_path)) for path in trajectory_files([training, evaluated])]
    assert found == ["t/trajectories/step_000000.parquet", "e/eval/step_000000.parquet"]
    with pytest.raises(StorageError, match="no run 'x'"):
        trajectory_files([tmp_path / "x"])


def invoke(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_the_command_writes_rows_that_can_be_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = run_dir(tmp_path / "e", "eval/step_000000.parquet"), tmp_path / "kept.parquet"
    assert invoke(str(run), "--out", str(out), "--max-accuracy", "0.9", "--min-accuracy", "0.1", "--json") == 0
    kept = load_samples([out], prompt_key="prompt")
    assert [sample.prompt[0].text for sample in kept] == ["q1", "q2", "q4"]
    assert all(sample.ground_truth == "7" and sample.info == {"extra_info": {"index": 1}} for sample in kept)
    assert '"kept": 3, "too_easy": 2, "too_hard": 1, "unmeasured": 1' in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists; nothing is overwritten"):
        invoke(str(run), "--out", str(out))
    with pytest.raises(DataError, match="nothing is left"):
        write_trajectories(tmp_path / "one.parquet", tries("all", "11"))
        invoke(str(tmp_path / "one.parquet"), "--out", str(tmp_path / "two.parquet"), "--max-accuracy", "0.5")
    assert not (tmp_path / "two.parquet").exists()

"""What a resumed run does again is put aside, whatever state its files are in, and whenever that is broken off."""

import json
import shutil

import pytest

from turnwise.storage.index import parse_line, record
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.training.runs.resumable_run import abandon_after
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn


def trajectory():
    turn = Turn(0, Message(Role.ASSISTANT, "18"), FinishReason.STOP, 0, 1, 1)
    sample = Sample("a", (Message(Role.USER, "6*3?"),), "arithmetic", "18")
    return Trajectory(sample, 0, 0, [], [turn], [], StopReason.ANSWERED, 0.0)


@pytest.fixture
def run(tmp_path):
    made = RunDir.create(tmp_path, "a", "train")
    for step in (3, 4):
        record(made, f"trajectories/step_{step:06d}.parquet", [trajectory()])
        made.write_json(f"eval/step_{step:06d}.json", {"accuracy": 1.0})
        made.append_jsonl("metrics.jsonl", {"step": step, "note": "é"})
    record(made, "eval/step_000003.parquet", [trajectory()])
    record(made, "eval/greedy_step_000004.parquet", [trajectory()])
    return made


def steps(run, name="metrics.jsonl"):
    path = run.path / name
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []


def check_resumed_at_three(run):
    kept = [parse_line(line).file for line in (run.path / "index.jsonl").read_text().splitlines()]
    assert kept == ["trajectories/step_000003.parquet", "eval/step_000003.parquet"]
    aside = sorted(str(path.relative_to(run.path / "abandoned")) for path in run.path.glob("abandoned/*/*"))
    assert aside == ["eval/greedy_step_000004.parquet", "eval/step_000004.json", "trajectories/step_000004.parquet"]
    assert len(read_trajectories(run.path / "trajectories/step_000003.parquet")) == 1
    assert steps(run) == [3] and set(steps(run, "abandoned/metrics.jsonl")) == {4}


def test_what_a_resumed_run_does_again_is_put_aside(run):
    with (run.path / "index.jsonl").open("a") as file:
        file.write("damaged\n")
    assert abandon_after(run, 3) == []
    check_resumed_at_three(run)
    abandon_after(run, -1)
    assert (run.path / "index.jsonl").read_text() == "" and not list(run.path.glob("trajectories/*.parquet"))
    assert steps(run) == [] and steps(run, "abandoned/metrics.jsonl") == [4, 3]


@pytest.mark.parametrize("torn", [b'{"step": 5, "no', b'{"step": 4, "note": "\xc3', b"\x00" * 40, b"5"])
def test_a_torn_last_line_is_left_out_with_a_note(run, torn):
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    (note,) = abandon_after(run, 3)
    assert "its last line is torn" in note and steps(run) == [3]


def test_a_last_line_that_only_lacks_its_end_is_kept(run):
    whole = (run.path / "metrics.jsonl").read_bytes()
    (run.path / "metrics.jsonl").write_bytes(whole.rstrip(b"\n"))
    assert abandon_after(run, 4) == [] and (run.path / "metrics.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"null", b"3", b'{"step": "3"}', b'{"step": true}', b'{"no": 1}', b"\xff\xfe", b"[" * 9999]
)
def test_other_unreadable_lines_are_kept_aside_and_named(run, line):
    before = (run.path / "metrics.jsonl").read_bytes()
    (run.path / "metrics.jsonl").write_bytes(line + b"\n" + before)
    (note,) = abandon_after(run, 3)
    assert "metrics.jsonl, line 1 cannot be read" in note
    assert (run.path / "abandoned" / "unreadable_metrics.jsonl").read_bytes() == line + b"\n"
    check_resumed_at_three(run)


def test_broken_off_at_any_operation_it_can_be_done_again(run, deaths, tmp_path):
    for operations in range(200):
        copy = RunDir(tmp_path / f"copy{operations}")
        shutil.copytree(run.path, copy.path)
        with deaths.after(operations) as outcome:
            abandon_after(copy, 3)
        abandon_after(copy, 3)
        check_resumed_at_three(copy)
        shutil.rmtree(copy.path)
        if not outcome.died:
            break
    assert operations > 5 and not outcome.died

"""Run folders that somebody else made, or broke: one of them never hides the others, and nothing waits for ever."""

import json
import os
import time

import pytest

from turnwise.errors import StorageError
from turnwise.ext.board.runs import Runs
from turnwise.ext.board.series import Series
from turnwise.ext.board.table import Table
from turnwise.storage.index import INDEX, record
from turnwise.storage.run_dir import RunDir

BAD_STATUS = ["[" * 100_000, '{"state": "running", "started": 1' + "0" * 400 + "}", "null", '{"state": 3}', "\x00"]
BAD_CONFIG = ["a: !!bool 'x'", "a: !!timestamp 'x'", "[" * 50_000, "- " * 50_000, "- a", "\x00", "a: &a [*a]"]


def folder(place, name, **files):
    run = RunDir(place / name)
    run.write_text("config.yaml", "task: arithmetic\n")
    for file, text in files.items():
        run.write_text(file, text)
    return run


@pytest.mark.parametrize("text", BAD_STATUS, ids=range(len(BAD_STATUS)))
def test_a_run_with_a_broken_status_is_listed_beside_the_others(tmp_path, text):
    folder(tmp_path, "bad", **{"status.json": text})
    folder(tmp_path, "good")
    found = {one["name"]: one for one in Runs([tmp_path]).summaries(time.time())}
    assert (
        set(found) == {"bad", "good"} and found["bad"]["state"] == "unknown" and "status.json" in found["bad"]["reason"]
    )


@pytest.mark.parametrize("text", BAD_CONFIG, ids=range(len(BAD_CONFIG)))
def test_a_run_with_a_broken_config_is_listed_beside_the_others(tmp_path, text):
    folder(tmp_path, "bad", **{"config.yaml": text})
    folder(tmp_path, "good")
    assert {one["name"] for one in Runs([tmp_path]).summaries(time.time())} == {"bad", "good"}


def test_pipes_are_not_read(tmp_path):
    run = folder(tmp_path, "a")
    os.mkfifo(run.file("eval/step_000001.json"))
    assert Runs([tmp_path]).summaries(time.time())[0]["accuracy"] is None
    os.mkfifo(run.file("images/index.jsonl"))
    with pytest.raises(StorageError, match="is no file"):
        Runs([tmp_path]).open("a").refresh()


def test_a_link_to_somebody_elses_words_is_not_followed(tmp_path):
    (tmp_path / "outside.json").write_text('["secret"]')
    (tmp_path / "runs").mkdir()
    run = folder(tmp_path / "runs", "a")
    (run.path / "tokens.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(StorageError, match="leads out of the runs"):
        Runs([tmp_path / "runs"]).open("a").refresh()


def test_many_runs_are_opened_without_looking_for_each_of_them_again(tmp_path, monkeypatch):
    for number in range(30):
        folder(tmp_path, f"run-{number}")
    runs, looks = Runs([tmp_path]), []
    look = runs._runs_in
    monkeypatch.setattr(runs, "_runs_in", lambda place: looks.append(place) or look(place))
    assert len(runs.summaries(time.time())) == 30 and len(looks) == 1


def test_a_line_whose_column_is_no_list_of_numbers_hides_no_other(run_dir, make):
    record(run_dir, "trajectories/step_000001.parquet", [make(), make(sibling=1)])
    good = json.loads((run_dir.path / INDEX).read_text())
    odd = {**good, "file": "trajectories/step_000009.parquet", "columns": {**good["columns"], "reward": [[1], [2]]}}
    with (run_dir.path / INDEX).open("a") as file:
        file.write(json.dumps(odd) + "\n")
    table = Table(run_dir)
    table.refresh(None)
    assert table.size == 2 and [one["file"] for one in table.damaged] == ["trajectories/step_000009.parquet"]


@pytest.mark.parametrize("name", [INDEX, "trajectories"])
def test_a_folder_for_a_file_and_the_other_way_round_is_named(run_dir, name):
    if name == INDEX:
        (run_dir.path / name).mkdir()
    else:
        (run_dir.path / name).write_text("")
    with pytest.raises(StorageError, match="cannot read"):
        Table(run_dir).refresh(None)


def test_numbers_at_the_edge_are_averaged(run_dir):
    run_dir.write_text("metrics.jsonl", "".join(f'{{"step": {n}, "x": 1e308}}\n' for n in range(300)))
    series = Series(run_dir)
    series.refresh()
    assert series.thinned("x", 10)["value"] == pytest.approx([1e308] * 10)


def test_metrics_written_anew_in_their_place_are_read_anew(run_dir):
    run_dir.write_text("metrics.jsonl", '{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n')
    series = Series(run_dir)
    series.refresh()
    with (run_dir.path / "metrics.jsonl").open("r+") as file:  # the same file, longer
        file.write('{"step": 1, "x": 7}\n{"step": 2, "x": 8}\n{"step": 3, "x": 9}\n')
    assert series.refresh() and series.get("x").value == [7.0, 8.0, 9.0] and series.problems() == []

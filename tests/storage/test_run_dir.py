"""The run directory: naming, atomic files, errors with reasons."""

import contextlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.errors import ConfigError, StorageError
from turnwise.storage.run_dir import RunDir, check_free
from turnwise.system.files import replacing


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk that takes `size` bytes per file; the same OSError path as a full one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_relative_folder_is_under_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir.create(Path("runs"), "first", "eval")
    assert run.path == tmp_path / "runs" / "first" and run.path.is_dir() and run.name == "first"


def test_names_made_from_the_command_never_collide(tmp_path: Path) -> None:
    paths = {RunDir.create(tmp_path, None, "eval").path for _ in range(5)}
    assert len(paths) == 5 and all(path.name.startswith("eval-2") for path in paths)


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "mine", "eval").write_text("plan.txt", "old")
    with pytest.raises(ConfigError, match="run 'mine' exists"):
        RunDir.create(tmp_path, "mine", "eval")
    assert (tmp_path / "mine" / "plan.txt").read_text() == "old"


@pytest.mark.parametrize("name", ["", " ", "a/b", "..", ".hidden", "a\\b", "-x", "~", "a\nb", "a\x00b", "x" * 300])
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="run="):
        RunDir.create(tmp_path, name, "eval")
    assert names(tmp_path) == []


def test_a_tilde_is_not_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="home folder"):
        RunDir.create(Path("~/runs"), None, "eval")
    assert names(tmp_path) == []


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StorageError, match=r"cannot create a run in .*runs: "):
        RunDir.create(tmp_path / "runs", "a", "eval")


def test_files_and_layout(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "a", "eval")
    run.write_text("config.yaml", "seed: 0\n")
    run.write_text("plan.txt", "é \ud800\n")
    run.write_json("eval/step_000010.json", {"mean": 0.5})
    assert run.file("trajectories/step_000012.parquet").parent.is_dir()
    assert run.log_path == run.path / "log.txt"
    assert run.read_text("plan.txt") == "é \\ud800\n"
    assert names(run.path / "eval") == ["step_000010.json"]


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", "", "."])
def test_files_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="inside the run directory"):
        RunDir.create(tmp_path, "a", "eval").write_text(name, "")


def test_new_files_follow_the_umask(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    run = RunDir.create(tmp_path, "a", "eval")
    assert run.write_text("plan.txt", "").stat().st_mode == plain.stat().st_mode


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "a", "eval")
    run.write_text("plan.txt", "old")
    with largest_file(1000), pytest.raises(StorageError, match=r"cannot write .*plan\.txt: File too large"):
        run.write_text("plan.txt", "x" * 5000)
    assert names(run.path) == ["plan.txt"] and run.read_text("plan.txt") == "old"


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with replacing(tmp_path / "a") as file:
            file.write(b"half")
            raise ZeroDivisionError
    assert names(tmp_path) == []


def test_jsonl_lines_are_whole(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "a", "eval")
    run.append_jsonl("metrics.jsonl", {"step": 1, "note": "two\nlines \ud800"})
    with largest_file(100), pytest.raises(StorageError, match="cannot append to"):
        run.append_jsonl("metrics.jsonl", {"note": "x" * 500})
    run.append_jsonl("metrics.jsonl", {"step": 2})
    assert run.read_jsonl("metrics.jsonl") == [{"step": 1, "note": "two\nlines \ud800"}, {"step": 2}]
    assert (run.path / "metrics.jsonl").read_bytes().count(b"\n") == 2


def test_what_json_lacks_is_refused_by_name(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "a", "eval")
    with pytest.raises(StorageError, match=r"metrics\.jsonl.*nan"):
        run.append_jsonl("metrics.jsonl", {"loss": float("nan")})
    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        run.append_jsonl("metrics.jsonl", {"loss": object()})


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "a", "eval")
    (run.path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n{half")
    with pytest.raises(StorageError, match="line 2"):
        run.read_jsonl("metrics.jsonl")
    with pytest.raises(StorageError, match="No such file"):
        run.read_text("absent.txt")


def test_opening_finds_the_nearest_run(tmp_path: Path) -> None:
    for name in ("grpo-small", "eval-1"):
        RunDir.create(tmp_path, name, "eval").write_text("config.yaml", "")
    assert RunDir.open(tmp_path / "eval-1").name == "eval-1"
    with pytest.raises(StorageError, match="did you mean 'grpo-small'"):
        RunDir.open(tmp_path / "grpo-smal")
    with pytest.raises(StorageError, match="holds the runs eval-1, grpo-small"):
        RunDir.open(tmp_path)
    with pytest.raises(StorageError, match="nothing to choose from"):
        RunDir.open(tmp_path / "absent" / "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="cannot be written"):
        RunDir.create(tmp_path, "a", "eval")


def test_a_file_that_is_appended_to_is_as_open_to_others_as_the_umask_says(tmp_path: Path) -> None:
    """Like every other file of a run: no more, and none that can be run."""
    run = RunDir.create(tmp_path, "r", "eval")
    before = os.umask(0o020)
    try:
        run.append_jsonl("metrics.jsonl", {"a": 1})
    finally:
        os.umask(before)
    assert (run.path / "metrics.jsonl").stat().st_mode & 0o777 == 0o646


def test_a_place_where_nothing_can_be_written_is_refused_before_anything_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda place, mode: Path(place) != tmp_path)  # as of an ordinary user
    for name in (None, "first"):
        with pytest.raises(StorageError, match=f"cannot create a run in .*runs: {tmp_path} cannot be written"):
            check_free(tmp_path / "runs", name)

"""Checkpoints appear whole or not at all, damage is found, and old ones go."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from turnwise.errors import StorageError
from turnwise.storage.checkpoints import NewestCheckpoint, find_checkpoint, write_checkpoint
from turnwise.storage.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "r", "train")


def fill(text: str):  # type: ignore[no-untyped-def]
    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "weights").write_text(text)
        (folder / "state.json").write_text("{}")

    return write


def read(folder: Path) -> str:
    """What is read of a checkpoint; one whose state is a list cannot be used."""
    if (folder / "state.json").read_text() == "[]":
        raise StorageError("state.json cannot be used")
    return (folder / "policy" / "weights").read_text()


def found(run: RunDir) -> str | None:
    checkpoint = find_checkpoint(run, read).checkpoint
    return None if checkpoint is None else checkpoint.state


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


def test_the_newest_is_found_and_older_ones_beyond_keep_are_removed(run: RunDir) -> None:
    for step in (1, 2, 3):
        write_checkpoint(run, step, fill(f"w{step}"), keep=2)
    assert names(run) == ["latest", "step_000002", "step_000003"]
    assert found(run) == "w3"
    assert (run.path / "checkpoints" / "latest").read_text().strip() == "step_000003"


def test_a_failure_while_writing_leaves_the_earlier_one_and_no_debris(run: RunDir) -> None:
    write_checkpoint(run, 1, fill("w1"), keep=2)

    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        write_checkpoint(run, 2, broken, keep=2)
    assert names(run) == ["latest", "step_000001"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "flip", "manifest", "no manifest", "unusable"])
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(run: RunDir, damage: str) -> None:
    write_checkpoint(run, 1, fill("good"), keep=5)
    newest = write_checkpoint(run, 2, fill("better"), keep=5)
    weights = newest / "policy" / "weights"
    match damage:
        case "truncate":
            os.truncate(weights, 2)
        case "remove":
            weights.unlink()
        case "flip":
            weights.write_text("bettes")
        case "manifest":
            (newest / "manifest.json").write_text("{")
        case "no manifest":
            (newest / "manifest.json").unlink()
        case "unusable":

            def other(folder: Path) -> None:
                (folder / "state.json").write_text("[]")

            write_checkpoint(run, 2, other, keep=5)
    newer = find_checkpoint(run, read)
    assert newer.checkpoint is not None and newer.checkpoint.folder.name == "step_000001"
    assert len(newer.passed_over) == 1 and newer.passed_over[0].startswith("step_000002: ")


def test_a_run_without_checkpoints_has_none(run: RunDir) -> None:
    assert find_checkpoint(run, read) == NewestCheckpoint(None, [])


def test_leftovers_of_a_killed_process_are_removed(run: RunDir) -> None:
    (run.path / "checkpoints" / ".step_000009.abcd.tmp").mkdir(parents=True)
    write_checkpoint(run, 1, fill("w"), keep=1)
    assert names(run) == ["latest", "step_000001"]


def test_a_checkpoint_of_the_same_step_is_replaced(run: RunDir) -> None:
    write_checkpoint(run, 2, fill("old"), keep=1)
    write_checkpoint(run, 2, fill("new"), keep=1)
    assert found(run) == "new" and names(run) == ["latest", "step_000002"]


def test_killed_at_any_operation_there_is_always_a_whole_checkpoint(run: RunDir, deaths: Any, tmp_path: Path) -> None:
    """Of the earlier step and of the same one, with what a process killed before has left."""
    write_checkpoint(run, 2, fill("old"), keep=1)
    for operations in range(300):
        copy = RunDir(tmp_path / f"copy{operations}")
        shutil.copytree(run.path, copy.path)
        for step, text in ((2, "new"), (2, "newer"), (3, "third")):
            before = found(copy)
            with deaths.after(operations) as outcome:
                write_checkpoint(copy, step, fill(text), keep=1)
            assert found(copy) in ((before, text) if outcome.died else (text,)), (operations, step)
        if not outcome.died:
            break
        write_checkpoint(copy, 3, fill("last"), keep=1)
        assert found(copy) == "last" and names(copy) == ["latest", "step_000003"], operations
    assert operations > 15 and not outcome.died


def test_a_damaged_newer_checkpoint_never_costs_the_one_just_written(run: RunDir) -> None:
    write_checkpoint(run, 1, fill("w1"), keep=5)
    damaged = write_checkpoint(run, 9, fill("w9"), keep=5)
    (damaged / "manifest.json").unlink()
    write_checkpoint(run, 2, fill("w2"), keep=1)
    assert found(run) == "w2" and "step_000001" not in names(run)


def test_a_manifest_that_lists_nothing_proves_nothing(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r", "train")
    folder = write_checkpoint(run, 1, lambda place: (place / "a").write_text("x") and None, keep=1)
    (folder / "manifest.json").write_text('{"step": 1, "files": {}}')
    found = find_checkpoint(run, lambda place: place)
    assert found.checkpoint is None
    assert found.passed_over == ["step_000001: manifest.json lists no files"]


def test_every_file_is_on_the_disk_before_the_folder_has_its_name(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the renaming must not leave a checkpoint of empty files."""
    events: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def replace(source: Any, target: Any) -> None:
        events.append(("rename", str(source)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    folder = write_checkpoint(run, 1, fill("a"), keep=1)
    named = next(
        n for n, (what, path) in enumerate(events) if what == "rename" and path.endswith(".tmp") and "step_" in path
    )
    temporary = Path(events[named][1])
    written = {str(path.relative_to(folder)) for path in (folder, *folder.rglob("*"))}
    synced = {str(Path(path).relative_to(temporary)) for what, path in events[:named] if what == "sync"}
    assert synced == written
    assert ("sync", str(folder.parent)) in events[named:], "and then the renaming itself"

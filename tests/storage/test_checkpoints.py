"""Checkpoints appear whole or not at all, damage is found, and old ones go."""

import os
from pathlib import Path

import pytest

from turnwise.errors import StorageError
from turnwise.storage.checkpoints import find_checkpoint, write_checkpoint
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


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


def test_the_newest_is_found_and_older_ones_beyond_keep_are_removed(run: RunDir) -> None:
    for step in (1, 2, 3):
        write_checkpoint(run, step, fill(f"w{step}"), keep=2)
    assert names(run) == ["latest", "step_000002", "step_000003"]
    found = find_checkpoint(run)
    assert found.folder is not None and (found.folder / "policy" / "weights").read_text() == "w3"
    assert (run.path / "checkpoints" / "latest").read_text().strip() == "step_000003"


def test_a_failure_while_writing_leaves_the_earlier_one_and_no_debris(run: RunDir) -> None:
    write_checkpoint(run, 1, fill("w1"), keep=2)

    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        write_checkpoint(run, 2, broken, keep=2)
    assert names(run) == ["latest", "step_000001"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "flip", "manifest", "no manifest"])
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
    found = find_checkpoint(run)
    assert found.folder is not None and found.folder.name == "step_000001"
    assert len(found.passed_over) == 1 and found.passed_over[0].startswith("step_000002: ")


def test_a_run_without_checkpoints_has_none(run: RunDir) -> None:
    assert find_checkpoint(run).folder is None


def test_leftovers_of_a_killed_process_are_removed(run: RunDir) -> None:
    (run.path / "checkpoints" / ".step_000009.abcd.tmp").mkdir(parents=True)
    write_checkpoint(run, 1, fill("w"), keep=1)
    assert names(run) == ["latest", "step_000001"]

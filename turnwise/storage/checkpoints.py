"""Checkpoints: a folder that appears complete or not at all, a pointer to the newest, and proof that it is whole."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import StorageError
from turnwise.storage.run_dir import RunDir

MANIFEST, LATEST = "manifest.json", "latest"


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that is whole, and what was wrong with newer ones."""

    folder: Path | None
    passed_over: list[str]


def write_checkpoint(run: RunDir, step: int, fill: Callable[[Path], None], *, keep: int) -> Path:
    """Let `fill` write a checkpoint's files, then give the folder its name; older ones beyond `keep` are removed.

    A process killed at any moment leaves the earlier checkpoints as they were.
    """
    parent = run.path / "checkpoints"
    final = parent / f"step_{step:06d}"
    temporary = parent / f".{final.name}.{secrets.token_hex(4)}.tmp"
    try:
        for leftover in parent.glob(".*.tmp") if parent.is_dir() else ():
            shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed
        temporary.mkdir(parents=True)
        fill(temporary)
        written = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(temporary)): _digest(path) for path in written}
        (temporary / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2), encoding="utf-8")
        for path in temporary.rglob("*"):
            _sync(path)
        if final.exists():  # written before a resume from an earlier one
            shutil.rmtree(final)
        os.replace(temporary, final)
        _sync(parent)
    except OSError as error:
        raise StorageError(f"cannot write the checkpoint {final}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    run.write_text(f"checkpoints/{LATEST}", final.name + "\n")
    for old in _all(run)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def find_checkpoint(run: RunDir) -> Found:
    """The newest whole checkpoint of a run; damaged ones are passed over with their reason."""
    passed_over: list[str] = []
    for folder in _all(run):
        problem = _problem(folder)
        if problem is None:
            return Found(folder, passed_over)
        passed_over.append(f"{folder.name}: {problem}")
    return Found(None, passed_over)


def _all(run: RunDir) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted((run.path / "checkpoints").glob("step_*"), reverse=True)


def _problem(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, digest in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if _digest(path) != digest:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

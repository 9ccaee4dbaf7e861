"""Checkpoints: a folder that appears complete or not at all, a pointer to the newest, and proof that it is whole."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from turnwise.errors import StorageError
from turnwise.storage.run_dir import RunDir

MANIFEST, LATEST = "manifest.json", "latest"
_BEFORE = ".before"
"""What is added to the name of a checkpoint while another of the same step takes its place."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checkpoint(Generic[T]):
    """A whole one, and what was read of it."""

    folder: Path
    state: T


@dataclass(frozen=True, slots=True)
class NewestCheckpoint(Generic[T]):
    """The newest checkpoint that is whole, and what was wrong with newer ones."""

    checkpoint: Checkpoint[T] | None
    passed_over: list[str]


def write_checkpoint(run: RunDir, step: int, fill: Callable[[Path], None], *, keep: int) -> Path:
    """Let `fill` write a checkpoint's files, then give the folder its name; older ones beyond `keep` are removed.

    A process killed at any moment leaves the earlier checkpoints as they were, also one of the same step.
    """
    return begin_checkpoint(run, step, fill).finish(keep)


def begin_checkpoint(run: RunDir, step: int, fill: Callable[[Path], None]) -> "UnfinishedCheckpoint":
    """The same in two parts: what `fill` leaves to others may be written until `finish` is called."""
    parent = run.path / "checkpoints"
    final = parent / f"step_{step:06d}"
    temporary = parent / f".{final.name}.{secrets.token_hex(4)}.tmp"
    begun = UnfinishedCheckpoint(run, step, temporary, final)
    try:
        for leftover in parent.glob(".*.tmp") if parent.is_dir() else ():
            _remove(leftover)  # of a process that was killed
        temporary.mkdir(parents=True)
        fill(temporary)
    except OSError as error:
        begun.drop()
        raise begun.refused(error) from error
    except BaseException:
        begun.drop()
        raise
    return begun


@dataclass(frozen=True, slots=True)
class UnfinishedCheckpoint:
    """A folder that is still being filled; nobody takes it for a checkpoint."""

    run: RunDir
    step: int
    temporary: Path
    final: Path

    def finish(self, keep: int) -> Path:
        """Give the folder its name once all is written; older ones beyond `keep` are removed."""
        parent, temporary, final = self.final.parent, self.temporary, self.final
        before = parent / f"{final.name}{_BEFORE}"
        try:
            written = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
            files = {str(path.relative_to(temporary)): _digest(path) for path in written}
            manifest = json.dumps({"step": self.step, "files": files}, indent=2)
            (temporary / MANIFEST).write_text(manifest, encoding="utf-8")
            for path in (*temporary.rglob("*"), temporary):
                _sync(path)
            if final.exists():  # written before a resume from an earlier one
                if before.exists():  # of a process killed between here and its removal: `final` is the newer
                    shutil.rmtree(before)
                os.replace(final, before)
            os.replace(temporary, final)
            _sync(parent)
        except OSError as error:
            raise self.refused(error) from error
        finally:
            self.drop()
        self.run.write_text(f"checkpoints/{LATEST}", final.name + "\n")
        shutil.rmtree(before, ignore_errors=True)
        for old in [folder for folder in _all(self.run) if folder.name < final.name][keep - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def drop(self) -> None:
        """Remove what was written of it."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def refused(self, error: OSError) -> StorageError:
        """The error that tells a person why the checkpoint cannot be written."""
        return StorageError(f"cannot write the checkpoint {self.final}: {error.strerror or error}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def find_checkpoint(run: RunDir, read: Callable[[Path], T]) -> NewestCheckpoint[T]:
    """The newest whole checkpoint of a run; damaged ones are passed over with their reason.

    `read` gives what its user needs of it, and a StorageError for one that cannot be used.
    """
    passed_over: list[str] = []
    for folder in _all(run):
        problem = _problem(folder)
        if problem is None:
            try:
                return NewestCheckpoint(Checkpoint(folder, read(folder)), passed_over)
            except StorageError as error:
                problem = str(error)
        passed_over.append(f"{folder.name}: {problem}")
    return NewestCheckpoint(None, passed_over)


def _all(run: RunDir) -> list[Path]:
    """Checkpoint folders, newest first; one that was being replaced comes after its replacement."""
    folders = (run.path / "checkpoints").glob("step_*")
    return sorted(folders, key=lambda path: (path.name.removesuffix(_BEFORE), path.suffix != _BEFORE), reverse=True)


def _problem(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not manifest["files"]:
            return f"{MANIFEST} lists no files"
        for name, digest in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if _digest(path) != digest:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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

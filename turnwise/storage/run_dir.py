"""The run directory: where a command writes what it did, and where the board, rescoring and replay read it.

runs/<name>/
  config.yaml, plan.txt               as run
  status.json                         how it is doing, see storage/status.py
  metrics.jsonl                       one object a step
  trajectories/step_000012.parquet    see storage/trajectories/files.py
  reused/step_000012.parquet          episodes of earlier steps that this one trained on again
  eval/step_000010.parquet, .json     and greedy_step_000010.parquet
  checkpoints/step_000010/            policy/ (Hugging Face), policy_adapter/ (peft, with LoRA) and the rest
  policy/, policy_adapter/            what a fine-tuning made, or what a training ships; shipped.json says of which step
  best/                               the policy of a training's best evaluation so far, and what that found
  demonstrations.json                 what it learned from, which is trajectories/step_000000.parquet
  index.jsonl                         every trajectory in short, see storage/index.py
  images/<hash>.png, index.jsonl      what the trajectories show, see storage/images/copies.py
  tokenizer.json                      for reading token ids
  rescored/NAME/                      the same trajectories with other rewards, and comparison.json
  abandoned/                          what was recorded of steps that were done again after a resume
  servers/server_0.log                what an inference server said that the run started
  warnings.jsonl                      what the run warned of, with the step; of steps that were done again too
  underway.json                       while it goes on: episodes that no file has yet, see storage/underway.py
  .lock                               who writes, while somebody does, see storage/lock.py
  log.txt
"""

import contextlib
import datetime
import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from turnwise.errors import ConfigError, StorageError
from turnwise.errors.nearest_name import nearest
from turnwise.system.files import cannot, check_regular, replacing

CONFIG, PLAN, METRICS, LOG, REPLAY = "config.yaml", "plan.txt", "metrics.jsonl", "log.txt", "replay.json"
TOKENIZER, WARNINGS, UNDERWAY = "tokenizer.json", "warnings.jsonl", "underway.json"
TRAINED, REUSED = "trajectories", "reused"
"""Folders of the episodes a step trained on: the new ones, and those of earlier steps."""
SERVER_LOGS, RESCORED, ABANDONED = "servers", "rescored", "abandoned"
_LONGEST_NAME = 200
_current: ContextVar[Path | None] = ContextVar("run_folder", default=None)


def run_folder() -> Path | None:
    """Of the run that the caller is a part of: where what it starts leaves its logs."""
    return _current.get()


@contextlib.contextmanager
def inside_run(folder: Path) -> Iterator[None]:
    """The block is a part of this run."""
    before = _current.set(folder)
    try:
        yield
    finally:
        _current.reset(before)


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run's folder. File names are relative to it: `run.write_text("plan.txt", plan)`."""

    path: Path

    @classmethod
    def create(cls, runs_dir: Path, name: str | None, command: str) -> "RunDir":
        """A new folder; a relative `runs_dir` is under the current folder, and no run is ever overwritten."""
        if runs_dir.parts[:1] and runs_dir.parts[0].startswith("~"):
            raise ConfigError(f"runs_dir={str(runs_dir)!r}: write the home folder out in full")
        check_free(runs_dir, name)
        stem = name or f"{command}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        parent = Path.cwd() / runs_dir
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for number in range(1, 1000):
                path = parent / (stem if number == 1 else f"{stem}-{number}")
                try:
                    path.mkdir()
                except FileExistsError:
                    check_free(runs_dir, name)  # made meanwhile
                else:
                    return cls(path)
        except OSError as error:
            raise cannot("create a run in", parent, error) from error
        raise StorageError(f"cannot find a free name for {stem!r} in {parent}")

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """An existing run, for reading."""
        if not path.is_dir():
            runs, below = _runs_in(path.parent), Path("runs") / path.parent
            if not runs and not path.is_absolute() and (further := _runs_in(below)):
                meant = nearest(f"runs/{path}", [str(below / name) for name in further])
                raise StorageError(f"no run {path.name!r} in {path.parent}: {meant}")
            raise StorageError(f"no run {path.name!r} in {path.parent}: {nearest(path.name, runs)}")
        if not (path / CONFIG).is_file():
            runs = _runs_in(path)
            hint = f"; it holds the runs {', '.join(runs[:12])}" if runs else ""
            raise StorageError(f"{path} is not a run directory: it has no {CONFIG}{hint}")
        return cls(path)

    @property
    def name(self) -> str:
        """The name of the run, which is that of its folder."""
        return self.path.name

    @property
    def log_path(self) -> Path:
        """The path of the run's log file."""
        return self.path / LOG

    def log(self, text: str) -> None:
        """Add a line with the time to log.txt."""
        try:
            with self.log_path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{datetime.datetime.now().isoformat(timespec='seconds')} {text}\n")
        except OSError as error:
            raise cannot("write to", self.log_path, error) from error

    def file(self, name: str) -> Path:
        """The path of a file, its folder made; never outside the run."""
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or not relative.name:
            raise StorageError(f"{name!r} is not a file inside the run directory")
        path = self.path / relative
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot("create", path.parent, error) from error
        return path

    def write_text(self, name: str, text: str) -> Path:
        """Write a whole file or nothing. What UTF-8 cannot hold is written as an escape."""
        return self.write_bytes(name, text.encode("utf-8", "backslashreplace"))

    def write_bytes(self, name: str, content: bytes) -> Path:
        """Write a whole file or nothing."""
        path = self.file(name)
        with replacing(path) as file:
            file.write(content)
        return path

    def write_json(self, name: str, value: Any) -> Path:
        """Write a value as indented JSON."""
        return self.write_text(name, _json(value, name, indent=2) + "\n")

    def append_jsonl(self, name: str, record: Mapping[str, Any]) -> None:
        """Add one line, whole or not at all: a reader never sees half of it, nor does the next writer."""
        path = self.file(name)
        line = (_json(dict(record), name) + "\n").encode("utf-8", "backslashreplace")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                _append_whole(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise cannot("append to", path, error) from error

    def read_text(self, name: str) -> str:
        """A file's text; StorageError when it is missing or not text."""
        try:
            return self.read_bytes(name).decode("utf-8")
        except UnicodeDecodeError as error:
            raise StorageError(f"cannot read {self.path / name}: it is not text") from error

    def read_bytes(self, name: str) -> bytes:
        """A file's content; StorageError when it is missing."""
        path = self.path / name
        try:
            check_regular(path)
            return path.read_bytes()
        except OSError as error:
            raise cannot("read", path, error) from error

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        """The records of a JSONL file of the run; StorageError names a damaged line."""
        records = []
        for number, line in enumerate(self.read_text(name).split("\n"), start=1):
            if line.strip():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise StorageError(f"{self.path / name}, line {number}: not valid JSON: {error}") from error
        return records


def trajectory_file(step: int, folder: str = TRAINED) -> str:
    """The name of the file with the episodes of a training step."""
    return f"{folder}/step_{step:06d}.parquet"


def _append_whole(descriptor: int, line: bytes) -> None:
    before = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(None, "the disk took only part of a line")
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, before)  # a full disk takes part of a line
        raise


def check_free(runs_dir: Path, name: str | None) -> None:
    """An error when no run can be written there, or none of this name; asked before anything is tried out."""
    parent = Path.cwd() / runs_dir
    above = next(folder for folder in (parent, *parent.parents) if os.path.exists(folder))
    if not os.access(above, os.W_OK):
        raise cannot("create a run in", parent, PermissionError(errno.EACCES, f"{above} cannot be written"))
    if name is None:
        return
    check_name(name)
    if os.path.lexists(parent / name):
        raise ConfigError(
            f"run {name!r} exists in {parent}: choose another name with run=, or resume a training with resume=auto"
        )


def check_name(name: str) -> None:
    """ConfigError for a name that no run can have."""
    problem = None
    if not name.strip():
        problem = "is empty"
    elif any(separator in name for separator in "/\\"):
        problem = "has a path separator; the folder is chosen with runs_dir"
    elif name[0] in ".-~":
        problem = f"begins with {name[0]!r}"
    elif not name.isprintable():
        problem = "has characters that cannot be shown"
    elif len(name.encode("utf-8", "replace")) > _LONGEST_NAME:
        problem = f"is longer than {_LONGEST_NAME} bytes"
    if problem:
        raise ConfigError(f"run={name[:_LONGEST_NAME]!r}: the name {problem}")


def _runs_in(folder: Path) -> list[str]:
    return sorted(entry.parent.name for entry in folder.glob(f"*/{CONFIG}")) if folder.is_dir() else []


def _json(value: Any, name: str, indent: int | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise StorageError(f"{name}: a value cannot be written as JSON: {error}: {str(value)[:200]}") from error

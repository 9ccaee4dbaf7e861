"""A run that outlives its process: resumed from its newest checkpoint, repeats put aside; stopped by signals."""

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console

from turnwise.config import Config
from turnwise.config.choices import Resume
from turnwise.errors import StorageError
from turnwise.storage.checkpoints import Checkpoint, NewestCheckpoint, find_checkpoint
from turnwise.storage.json_text import parse
from turnwise.storage.lock import holding
from turnwise.storage.run_dir import ABANDONED, CONFIG, METRICS, RunDir
from turnwise.system.files import cannot
from turnwise.system.stopping import first_signal
from turnwise.training.runs.resume_config import changed_settings, existing_run, refuse_changes
from turnwise.training.runs.run import Run, printer

S = TypeVar("S")
"""What a checkpoint says of how far the run had come."""
R = TypeVar("R", bound="ResumableRun[Any]")


class ResumableRun(Run, Generic[S]):
    """What `train` and `sft` share beyond `Run`. `found` is where a run that is resumed goes on."""

    def __init__(
        self,
        config: Config,
        directory: RunDir,
        command: str,
        console: Console,
        read: Callable[[Path], S],
        *,
        resuming: bool,
        steps: int | None,
        trackers: Sequence[str],
    ) -> None:
        # Whatever is wrong comes out here, before anything of the run is touched.
        self.found: NewestCheckpoint[S] = _find(directory, read) if resuming else NewestCheckpoint(None, [])
        self.stopping = asyncio.Event()
        self.resuming = resuming
        super().__init__(config, directory, command, console, steps=steps, trackers=trackers)

    @contextmanager
    def stop_on_signal(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run after what it is doing; a second one ends it at once."""

        def stop() -> None:
            self.note("stopping after the current step (a second signal stops at once)")
            self.stopping.set()

        with first_signal(stop):
            yield

    def refuse_policy_only(self) -> None:
        """A run that is to go on needs more than its policy."""
        from turnwise.engines.learners.state import holds_state

        checkpoint = self.found.checkpoint
        if checkpoint is not None and not holds_state(checkpoint.folder):
            raise StorageError(
                f"run {self.dir.name!r} cannot go on: {checkpoint.folder.name} holds its policy only "
                f"(training.save_last=false); start a new run with model.path={self.dir.path / 'policy'}"
            )

    def restore(self, load: Callable[[Checkpoint[S]], None], step: int, *, keep_from: int) -> None:
        """Go on after `step`, loading the newest whole checkpoint; without one, begin anew in the run's directory.

        Without one what was recorded from step `keep_from` on is put aside.
        """
        for problem in self.found.passed_over:
            self.note(f"damaged checkpoint passed over: {problem}")
        checkpoint = self.found.checkpoint
        if checkpoint is not None:
            load(checkpoint)
        for key, (then, now) in changed_settings(self.dir, self.config).items():
            self.note(f"changed: {key} was {then} and is {now}")
        for text in abandon_after(self.dir, keep_from - 1 if checkpoint is None else step):
            self.note(text)
        self.write_config()
        self.status.at(step)
        if checkpoint is None:
            self.note("no checkpoint to resume from: starting at step 0; earlier records were moved to abandoned/")
        else:
            self.note(f"resumed from {checkpoint.folder.name}: {step} steps done")


def _find(directory: RunDir, read: Callable[[Path], S]) -> NewestCheckpoint[S]:
    search = find_checkpoint(directory, read)
    if search.checkpoint is None and search.passed_over:
        problems = "; ".join(search.passed_over)
        raise StorageError(f"run {directory.name!r} cannot be resumed: all its checkpoints are damaged: {problems}")
    return search


@contextmanager
def open_run(config: Config, command: str, console: Console, make: Callable[[RunDir, bool], R]) -> Iterator[R]:
    """The run to resume, or a new one, held against other writers until the block ends.

    `make` is told whether it is resumed. Nothing of a run that is refused is touched.
    """
    directory = existing_run(config, command)
    if directory is None:
        directory = RunDir.create(Path(config.runs_dir), config.run, command)
        if config.resume is Resume.auto and config.run is not None:
            printer(console)(f"there is no run {config.run!r} in {config.runs_dir} to resume: a new one begins")
    with holding(directory.path, command, printer(console)):
        resuming = (directory.path / CONFIG).is_file()
        if resuming:
            refuse_changes(directory, config, command)
        run = make(directory, resuming)
        if not resuming:
            run.write_config()
        yield run


_STEP = re.compile(r"step_(\d+)\.(?:parquet|json)$")


@dataclass(slots=True)
class _Metrics:
    """The lines of metrics.jsonl by what becomes of them."""

    kept: list[bytes] = field(default_factory=list)
    later: list[bytes] = field(default_factory=list)
    unreadable: list[bytes] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def abandon_after(run: RunDir, step: int) -> list[str]:
    """Put aside what was recorded after this step; returns what a person should know.

    Everything is read before anything is moved. Broken off at any point, it can be done again.
    """
    from turnwise.storage.index import INDEX

    metrics = _sorted(run, step)
    files = [
        path
        for pattern in ("trajectories/*.parquet", "reused/*.parquet", "eval/*.parquet", "eval/*.json")
        for path in sorted(run.path.glob(pattern))
        if (match := _STEP.search(path.name)) and int(match[1]) > step
    ]
    for name, lines in (("metrics", metrics.later), ("unreadable_metrics", metrics.unreadable)):
        if lines:
            _append(run.file(f"{ABANDONED}/{name}.jsonl"), lines)
    for path in files:
        try:
            os.replace(path, run.file(f"{ABANDONED}/{path.relative_to(run.path)}"))
        except OSError as error:
            raise cannot("move", path, error) from error
    if (run.path / METRICS).is_file():
        run.write_bytes(METRICS, b"".join(metrics.kept))
    if (run.path / INDEX).is_file():
        lines = [line for line in run.read_bytes(INDEX).split(b"\n") if _is_of_a_file(run, line)]
        run.write_bytes(INDEX, b"".join(line + b"\n" for line in lines))
    return metrics.notes


def _sorted(run: RunDir, step: int) -> _Metrics:
    metrics = _Metrics()
    if not (run.path / METRICS).is_file():
        return metrics
    *lines, torn = run.read_bytes(METRICS).split(b"\n")
    for number, line in enumerate(lines, start=1):
        of = _step_of(line)
        if of is not None:
            (metrics.kept if of <= step else metrics.later).append(line + b"\n")
        elif line.strip():
            metrics.unreadable.append(line + b"\n")
            metrics.notes.append(
                f"{METRICS}, line {number} cannot be read: kept in {ABANDONED}/unreadable_metrics.jsonl"
            )
    if torn.strip():
        of = _step_of(torn)
        if of is None:
            metrics.notes.append(f"{METRICS}: its last line is torn and left out ({len(torn)} bytes)")
        else:  # whole but for its end
            (metrics.kept if of <= step else metrics.later).append(torn + b"\n")
    return metrics


def _step_of(line: bytes) -> int | None:
    """The step of a line of metrics; None for one that this code did not write."""
    try:
        step = parse(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None


def _append(path: Path, lines: list[bytes]) -> None:
    try:
        with path.open("ab") as file:
            file.writelines(lines)
    except OSError as error:
        raise cannot("append to", path, error) from error


def _is_of_a_file(run: RunDir, line: bytes) -> bool:
    from turnwise.storage.index import parse_line

    try:
        return (run.path / parse_line(line).file).is_file()
    except StorageError:  # a damaged line says nothing; readers go by the file itself
        return False

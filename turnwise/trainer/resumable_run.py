"""A run that survives its process: resumed from its newest checkpoint, and stopped by a signal between two steps."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console

from turnwise.choices import Resume
from turnwise.config import Config
from turnwise.errors import StorageError
from turnwise.run import Run, printer
from turnwise.stopping import first_signal
from turnwise.storage.abandoned import abandon_after
from turnwise.storage.checkpoints import Checkpoint, Found, find_checkpoint
from turnwise.storage.lock import holding
from turnwise.storage.run_dir import CONFIG, RunDir
from turnwise.trainer.resuming import changed_settings, existing_run, refuse_changes

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
        self.found: Found[S] = _find(directory, read) if resuming else Found(None, [])
        self.stopping = asyncio.Event()
        self.resuming = resuming
        super().__init__(config, directory, command, console, steps=steps, trackers=trackers)

    @contextmanager
    def stop_on_signal(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run after what it is doing; a second one ends it at once."""

        def stop() -> None:
            self.note("stopping: the present step ends first (again: at once)")
            self.stopping.set()

        with first_signal(stop):
            yield

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
            self.note("no checkpoint to resume from: starting at step 0; what was recorded is under abandoned/")
        else:
            self.note(f"resumed from {checkpoint.folder.name}: {step} steps done")


def _find(directory: RunDir, read: Callable[[Path], S]) -> Found[S]:
    found = find_checkpoint(directory, read)
    if found.checkpoint is None and found.passed_over:
        problems = "; ".join(found.passed_over)
        raise StorageError(f"run {directory.name!r} cannot be resumed: all its checkpoints are damaged: {problems}")
    return found


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

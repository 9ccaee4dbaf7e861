"""One run of supervised fine-tuning: how far it has come, when it ends, its checkpoints and its policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from turnwise.config import Config
from turnwise.engines.learners.learner import Learner
from turnwise.errors import StorageError
from turnwise.storage.checkpoints import Checkpoint, write_checkpoint
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State
from turnwise.training.runs.resumable_run import ResumableRun, open_run
from turnwise.training.runs.state import Count, Number, read_json, write_json
from turnwise.training.sft import SftStep

HELDOUT_LOSSES = 10
"""How often the loss of held-out conversations is measured in a run, beside the one before its first step."""


@dataclass(slots=True)
class SftProgress:
    """How far a fine-tuning has come; all of it is in every checkpoint."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    steps: Count = 0
    """Of the whole run."""
    sequences: str = ""
    """The fingerprint of what is learned from."""
    step: Count = 0
    tokens: Count = 0
    """Policy tokens learned from, each as often as it came up."""
    seconds: Number = 0.0
    first_loss: Number | None = None
    last_loss: Number | None = None
    first_heldout: Number | None = None
    """The loss of held-out conversations before the first step; None without any."""
    last_heldout: Number | None = None


class SftState(BaseModel):
    """The whole content of state.json in a checkpoint of fine-tuning."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1]
    progress: SftProgress


def read_sft_state(folder: Path) -> SftState:
    """The state in a checkpoint's folder."""
    return read_json(folder, SftState)


class SftRun(ResumableRun[SftState]):
    """Opened once per process; `progress` survives it."""

    def __init__(self, config: Config, directory: RunDir, console: Console, *, resuming: bool) -> None:
        trackers = [name for name in config.tracking.to if name != "console"]  # the progress bar shows as much
        super().__init__(
            config, directory, "sft", console, read_sft_state, resuming=resuming, steps=config.sft.steps,
            trackers=trackers,
        )  # fmt: skip
        checkpoint = self.found.checkpoint
        self.progress = SftProgress() if checkpoint is None else checkpoint.state.progress
        self._saved_step = self.progress.step

    def is_over(self) -> bool:
        """Whether the run had done all its steps."""
        return 0 < self.progress.steps <= self.progress.step and not self.should_continue()

    def begin(self, learner: Learner, steps: int, sequences: str) -> None:
        """Before the first step of this process: `learner` goes on where the run had come to."""
        if self.found.checkpoint is not None and self.progress.sequences != sequences:
            raise StorageError(f"run {self.dir.name!r} cannot be resumed: its recorded trajectories have changed")
        self.progress.steps, self.progress.sequences = steps, sequences
        self.status.expect(steps)
        if self.resuming:

            def load(checkpoint: Checkpoint[SftState]) -> None:
                learner.load(checkpoint.folder)

            self.restore(load, self.progress.step, keep_from=1)  # what is learned from is recorded as step 0
        self.start_trackers(resumed_at=self.progress.step)

    def should_continue(self) -> bool:
        """Whether another step is due; otherwise the status says why not."""
        minutes, end, reason = self.config.training.max_minutes, State.FINISHED, ""
        if self.progress.step >= self.progress.steps:
            reason = f"all {self.progress.steps} steps done"
        elif self.stopping.is_set():
            end, reason = State.STOPPED, "stopped by a signal"
        elif minutes is not None and self.seconds() >= 60 * minutes:
            end, reason = State.STOPPED, f"training.max_minutes={minutes:g} reached"
        self.status.end, self.status.reason = end, reason
        return not reason

    def should_evaluate(self) -> bool:
        """Whether the loss of held-out conversations is due after the step that is being made."""
        step, steps = self.progress.step + 1, self.progress.steps
        return step == steps or step % max(1, steps // HELDOUT_LOSSES) == 0

    def finish_step(self, step: SftStep, heldout: float | None = None) -> None:
        """Counts a finished step and logs its metrics, with the loss of held-out conversations where it was due."""
        progress = self.progress
        progress.step += 1
        progress.tokens += step.policy_tokens
        progress.first_loss = step.loss if progress.first_loss is None else progress.first_loss
        progress.last_loss = step.loss
        measured = {} if heldout is None else {"sft/heldout_loss": heldout}
        progress.last_heldout = progress.last_heldout if heldout is None else heldout
        self.log_metrics(progress.step, progress.tokens, step.metrics() | measured | self.trackers.metrics())
        every = max(1, progress.steps // 20)
        if not self.console.is_terminal and progress.step % every == 0:  # a bar is drawn on a terminal only
            self.note(f"step {progress.step}/{progress.steps}: loss {step.loss:.3f}")

    def should_save(self) -> bool:
        """Whether a checkpoint between two steps is due; after the last step there is one anyway."""
        every = self.config.training.save_every
        return every > 0 and self.progress.step % every == 0 and self.progress.step < self.progress.steps

    def seconds(self) -> float:
        """Wall time of the run, earlier processes included."""
        return self.progress.seconds + super().seconds()

    def save(self, learner: Learner) -> None:
        """Write a checkpoint of everything, unless the newest is of this step."""
        if self._saved_step == self.progress.step:
            return
        state = SftState(format=1, progress=replace(self.progress, seconds=self.seconds()))

        whole = self.config.training.save_last or self.progress.step < self.progress.steps

        def fill(folder: Path) -> None:
            learner.save_policy(folder)
            if whole:
                learner.save(folder)
            write_json(folder, state)
            learner.saved()

        folder = write_checkpoint(self.dir, self.progress.step, fill, keep=self.config.training.keep)
        self._saved_step = self.progress.step
        self.note(f"checkpoint {folder}")


@contextmanager
def open_sft_run(config: Config, console: Console) -> Iterator[SftRun]:
    """The run to resume, or a new one, held against other writers until the block ends."""

    def make(directory: RunDir, resuming: bool) -> SftRun:
        return SftRun(config, directory, console, resuming=resuming)

    with open_run(config, "sft", console, make) as run:
        yield run

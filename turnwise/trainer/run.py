"""One training run: its directory, how far it has come, when it ends, and how it goes on after a stop."""

import asyncio
import json
import math
import signal
import time
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from turnwise.choices import Decay, Resume
from turnwise.compose import differences, flat, to_yaml
from turnwise.config import Config
from turnwise.data.loader import Loader, LoaderState
from turnwise.errors import ConfigError, StorageError
from turnwise.storage.checkpoints import find_checkpoint, write_checkpoint
from turnwise.storage.index import abandon_after
from turnwise.storage.recorder import Recorder
from turnwise.storage.run_dir import METRICS, RunDir
from turnwise.storage.status import State, Telling, how_it_ended
from turnwise.storage.trackers.choose import open_trackers
from turnwise.storage.trackers.tracker import Point
from turnwise.trainer.stage import TrainingStage
from turnwise.types import Sample, Trajectory
from turnwise.web.beside import start_board

T = TypeVar("T")
MAY_CHANGE = (
    "run", "runs_dir", "resume", "train", "board", "board_port", "tracking.", "engine.", "eval.", "sft.",
    "training.steps", "training.eval_every", "training.save_every", "training.keep", "training.target",
    "training.max_minutes", "training.max_tokens",
)  # fmt: skip
"""Keys that a resumed run may set anew; all others would make it another run."""


@dataclass(slots=True)
class Progress:
    """How far a run has come; all of it is in every checkpoint.

    `rounds` is the ledger: groups are consumed in the loader's order, so the samples used are exactly its first
    `rounds` batches, none skipped and none twice.
    """

    step: int = 0
    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int | None = None
    before: dict[str, Any] = field(default_factory=dict)


class TrainRun:
    """Opened once per process; `progress` survives it."""

    def __init__(self, config: Config, samples: list[Sample], console: Console) -> None:
        self.config, self.console = config, console
        self.progress = Progress()
        self.loader = Loader(samples, config.training.groups, config.seed, config.training.shuffle)
        self.stopping = asyncio.Event()
        self.reason = ""
        self.first_step = True
        self._started = self._step_began = time.perf_counter()
        existing = config.run is not None and (Path.cwd() / config.runs_dir / config.run / "config.yaml").is_file()
        self.resuming = existing and config.resume is Resume.auto
        if self.resuming:
            self.dir = RunDir.open(Path.cwd() / config.runs_dir / str(config.run))
            self._refuse_another_config()  # before anything of the run is touched
        else:
            self.dir = RunDir.create(Path(config.runs_dir), config.run, "train")
            self.dir.write_text("config.yaml", to_yaml(config))
        self.recorder = Recorder(self.dir)
        self.telling = Telling(self.dir, "train", config.training.steps)
        tracking, steps = config.tracking, config.training.steps
        self.trackers = open_trackers(
            tracking.to, project=tracking.project, steps=steps, console=console, say=self.note
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The run says how it is doing to whoever looks: status.json, its trackers, and a board when one is wanted."""
        with self.telling, self.recorder, ExitStack() as board:
            if self.config.board:
                note = board.enter_context(start_board(self.dir.path.parent, self.config.board_port)).note
                self.note(note)
            try:
                yield
            except BaseException as error:
                with suppress(StorageError):  # the error itself is the news, also when the disk is full
                    self.trackers.finish(*how_it_ended(error))
                raise
            self.trackers.finish(self.telling.end, self.reason)

    def note(self, text: str) -> None:
        """Say something to the person and to the log."""
        self.dir.log(text)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step_begins(self) -> None:
        """From here on time is the next step's; evaluations and checkpoints between two steps belong to neither."""
        self._step_began = time.perf_counter()

    def finish_step(self, rounds: int, trajectories: list[Trajectory]) -> None:
        """Count a step whose groups took this many rounds."""
        self.first_step = False
        self.progress.step += 1
        self.progress.rounds += rounds
        self.progress.tokens += sum(turn.completion_tokens for t in trajectories for turn in t.turns)

    def remember(self, found: dict[str, float]) -> None:
        """Log an evaluation; the best accuracy so far is kept."""
        if self.progress.best is None or found["accuracy"] > self.progress.best:
            self.progress.best, self.progress.best_step = found["accuracy"], self.progress.step
        self.log({f"val/{name}": value for name, value in found.items()})
        shown = ", ".join(f"{name} {value:.1%}" for name, value in found.items() if "/" not in name)
        self.note(f"step {self.progress.step}: {shown}")

    def timings(self, trajectories: list[Trajectory], update: float) -> dict[str, float]:
        """How long the step took and how fast it was; collection is what came before the update."""
        now = time.perf_counter()
        step = now - self._step_began
        tokens = sum(len(ledger) for t in trajectories for ledger in t.segments)
        return {
            "timing_s/step": step,
            "timing_s/update_actor": update,
            "timing_s/gen": step - update,
            "perf/total_num_tokens": float(tokens),
            "perf/throughput": tokens / step,
            **self.trackers.metrics(),
        }

    def log(self, metrics: dict[str, float]) -> None:
        """Add the step's line to metrics.jsonl, and tell the trackers."""
        metrics = {name: float(value) for name, value in metrics.items()}
        point = Point(self.progress.step, round(self.seconds(), 3), self.progress.tokens, metrics)
        head = {"step": point.step, "seconds": point.seconds, "tokens": point.tokens}
        self.dir.append_jsonl(METRICS, head | {k: v if math.isfinite(v) else None for k, v in metrics.items()})
        self.trackers.log(point)
        self.telling.at(self.progress.step)

    def goes_on(self) -> bool:
        """Whether another step is due; otherwise `reason` says why not."""
        training = self.config.training
        if self.stopping.is_set():
            self.reason, self.telling.end = "stopped by a signal", State.STOPPED
        elif self.progress.step >= training.steps:
            self.reason = f"all {training.steps} steps done"
        elif training.target is not None and (self.progress.best or 0.0) >= training.target:
            self.reason = f"the target of {training.target:.0%} is reached"
        elif training.max_minutes is not None and self.seconds() >= 60 * training.max_minutes:
            self.reason, self.telling.end = f"training.max_minutes={training.max_minutes:g} are used", State.STOPPED
        elif training.max_tokens is not None and self.progress.tokens >= training.max_tokens:
            self.reason, self.telling.end = f"training.max_tokens={training.max_tokens} are used", State.STOPPED
        self.telling.reason = self.reason
        return not self.reason

    def seconds(self) -> float:
        """Wall time of the run, earlier processes included."""
        return self.progress.seconds + time.perf_counter() - self._started

    async def unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None when a signal came first; what was half done is dropped."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for entry in (task, stop):
                entry.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    @contextmanager
    def catching_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run after what it is doing; a second one ends it at once."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            self.note("stopping: the present step ends first (again: at once)")
            self.stopping.set()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save(self, engines: TrainingStage) -> Path:
        """Write a checkpoint of everything."""
        saved = asdict(self.progress) | {"seconds": self.seconds()}
        position = self.progress.rounds * self.config.training.groups
        content = {"run": saved, "loader": asdict(self._loader_at(position))}
        keep = max(1, self.config.training.keep)
        folder = write_checkpoint(self.dir, self.progress.step, lambda place: engines.save(place, content), keep=keep)
        self.note(f"checkpoint {folder}")
        return folder

    def resume(self, engines: TrainingStage) -> None:
        """Go on from the newest whole checkpoint; a run without one starts anew in its directory."""
        if self.resuming:
            self._go_on(engines)
        self.trackers.start(self.dir, flat(self.config), resumed_at=self.progress.step)

    def _go_on(self, engines: TrainingStage) -> None:
        found = find_checkpoint(self.dir)
        for problem in found.passed_over:
            self.note(f"damaged checkpoint passed over: {problem}")
        if found.folder is None:
            self.note("no checkpoint to resume from: starting at step 0")
            self._forget_after(-1)
            return
        content = engines.load(found.folder)
        self.progress = Progress(**content["run"])
        self.loader.restore(LoaderState(**content["loader"]))
        self._forget_after(self.progress.step)
        self.telling.at(self.progress.step)
        self.note(f"resumed from {found.folder.name}: {self.progress.step} steps done")

    def _loader_at(self, position: int) -> LoaderState:
        """The loader's state after the consumed samples; it may itself be ahead of them."""
        now = self.loader.state()
        size = self.loader.size
        return LoaderState(position // size, position % size, now.fingerprint, now.seed, now.batch_size, now.shuffle)

    def _refuse_another_config(self) -> None:
        found = differences(self.dir.path / "config.yaml", self.config)
        sections = tuple(key for key in MAY_CHANGE if key.endswith("."))
        changed = {key: pair for key, pair in found.items() if key not in MAY_CHANGE and not key.startswith(sections)}
        if "training.steps" in found and self.config.learner.decay is not Decay.constant:
            changed["training.steps"] = found["training.steps"]
        if changed:
            told = "; ".join(f"{key} was {then!r} and is {now!r}" for key, (then, now) in changed.items())
            raise ConfigError(f"run {self.dir.name!r} cannot be resumed with another config: {told}")

    def _forget_after(self, step: int) -> None:
        """What is done again must not be there twice."""
        abandon_after(self.dir, step)
        if not (self.dir.path / METRICS).is_file():
            return
        lines = [line for line in self.dir.read_jsonl(METRICS) if line["step"] <= step]
        self.dir.write_text(METRICS, "".join(json.dumps(line) + "\n" for line in lines))

"""One training run: its directory, how far it has come, when it ends, and how it goes on after a stop."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from turnwise.compose import flat
from turnwise.config import Config
from turnwise.data.loader import Loader, LoaderState
from turnwise.errors import StorageError
from turnwise.report import TrainReport
from turnwise.stopping import first_signal
from turnwise.storage.abandoned import abandon_after
from turnwise.storage.checkpoints import Found, find_checkpoint, write_checkpoint
from turnwise.storage.recorder import Recorder
from turnwise.storage.run_dir import METRICS, RunDir
from turnwise.storage.status import State, Telling, how_it_ended
from turnwise.storage.trackers.choose import open_trackers
from turnwise.storage.trackers.tracker import Point
from turnwise.trainer.resuming import resume_command, set_anew, write_config
from turnwise.trainer.stage import TrainingStage
from turnwise.trainer.state import Progress, RunState, read_state
from turnwise.types import Sample, Trajectory
from turnwise.web.board_process import start_board

T = TypeVar("T")


class TrainRun:
    """Opened once per process; `progress` survives it."""

    def __init__(
        self, config: Config, samples: list[Sample], console: Console, directory: RunDir, *, resuming: bool
    ) -> None:
        self.config, self.console, self.dir = config, console, directory
        self.progress = Progress()
        self.loader = Loader(samples, config.training.groups, config.seed, config.training.shuffle)
        self.stopping = asyncio.Event()
        self.reason = ""
        self.first_step = True
        self.whole = True
        """Whether the learner's weights are those of `progress`; in the middle of an update they are not."""
        self._saved_step = 0
        self._started = self._step_began = time.perf_counter()
        self._resuming = resuming
        self._found: Found[RunState] = self._look_back() if resuming else Found(None, [])
        self.recorder = Recorder(self.dir)
        self.telling = Telling(self.dir, "train", config.training.steps)
        tracking, steps = config.tracking, config.training.steps
        self.trackers = open_trackers(
            tracking.to, project=tracking.project, steps=steps, console=console, say=self.note
        )

    def is_over(self) -> bool:
        """Whether the run had come to its end and nothing is asked for that it has not done."""
        return self.config.train and self.progress.after is not None and not self.goes_on()

    def report(self, reason: str) -> TrainReport:
        """What came of it."""
        done, before, after = self.progress.step, self.progress.before or {}, self.progress.after or {}
        return TrainReport(self.dir.path, reason, done, self.seconds(), before, after)

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
        self.first_step, self.whole = False, True
        self.progress.step += 1
        self.progress.rounds += rounds
        self.progress.tokens += sum(turn.completion_tokens for t in trajectories for turn in t.turns)

    def remember(self, found: dict[str, float]) -> None:
        """Log an evaluation; the best accuracy so far is kept. One that scored nothing has no accuracy."""
        accuracy, best = found.get("accuracy"), self.progress.best
        if accuracy is not None and (best is None or accuracy > best):
            self.progress.best, self.progress.best_step = accuracy, self.progress.step
        self.progress.evaluated = self.progress.step
        self.log({f"val/{name}": value for name, value in found.items()})
        shown = ", ".join(f"{name} {value:.1%}" for name, value in found.items() if "/" not in name)
        self.note(f"step {self.progress.step}: {shown or 'no episode was scored'}")

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
        elif training.target is not None and self.progress.best is not None and self.progress.best >= training.target:
            self.reason = f"the target of {training.target:.0%} is reached"
        elif training.max_minutes is not None and self.seconds() >= 60 * training.max_minutes:
            self.reason, self.telling.end = f"training.max_minutes={training.max_minutes:g} are used", State.STOPPED
        elif training.max_tokens is not None and self.progress.tokens >= training.max_tokens:
            self.reason, self.telling.end = f"training.max_tokens={training.max_tokens} are used", State.STOPPED
        self.telling.reason = self.reason
        return not self.reason

    def is_due(self, every: int) -> bool:
        """Whether something done every so many steps is to be done now; after the last step everything is."""
        return every > 0 and self.progress.step % every == 0 and self.progress.step != self.config.training.steps

    def evaluation_is_due(self) -> bool:
        """Whether the evaluation between two steps is due and not done yet."""
        return self.is_due(self.config.training.eval_every) and self.progress.evaluated != self.progress.step

    def seconds(self) -> float:
        """Wall time of the run, earlier processes included."""
        return self.progress.seconds + time.perf_counter() - self._started

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None when a signal came first; what was half done is dropped."""
        if self.stopping.is_set():
            work.close()
            return None
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

        def stop() -> None:
            self.note("stopping: the present step ends first (again: at once)")
            self.stopping.set()

        with first_signal(stop):
            yield

    # --- checkpoints --------------------------------------------------------------------------------------------

    async def save(self, engines: TrainingStage) -> Path:
        """Write a checkpoint of everything while collection goes on; nobody changes the learner meanwhile."""
        return await self.recorder.do(engines.in_threads(self._write_checkpoint), engines)

    def _write_checkpoint(self, engines: TrainingStage) -> Path:
        progress = replace(self.progress, seconds=self.seconds())
        loader = self._loader_at(self.progress.rounds * self.config.training.groups)
        folder = write_checkpoint(
            self.dir,
            self.progress.step,
            lambda place: engines.save(place, progress, loader),
            keep=self.config.training.keep,
        )
        self._saved_step = self.progress.step
        self.note(f"checkpoint {folder}")
        return folder

    @asynccontextmanager
    async def keeping_what_was_done(self, engines: TrainingStage) -> AsyncIterator[None]:
        """A failure of the block costs no finished step: the last good state is saved before it goes on its way."""
        try:
            yield
        except Exception:
            if self.whole and self.progress.step > self._saved_step:
                with suppress(StorageError):  # the failure is the news, also when the disk is full
                    await self.save(engines)
                    self.note(f"go on with: {resume_command(self.dir.name, self.config)}")
            raise

    def _look_back(self) -> Found[RunState]:
        """Find where to go on. Whatever is wrong comes out here, before anything of the run is touched."""
        found = find_checkpoint(self.dir, read_state)
        if found.checkpoint is not None:
            state = found.checkpoint.state
            self.loader.restore(state.loader.state())
            self.progress, self._saved_step = state.progress, state.progress.step
        elif found.passed_over:
            problems = "; ".join(found.passed_over)
            raise StorageError(f"run {self.dir.name!r} cannot go on: all its checkpoints are damaged: {problems}")
        return found

    def resume(self, engines: TrainingStage) -> None:
        """Go on from the newest whole checkpoint; a run without one starts anew in its directory."""
        if self._resuming:
            self._go_on(engines)
        self.trackers.start(self.dir, flat(self.config), resumed_at=self.progress.step)

    def _go_on(self, engines: TrainingStage) -> None:
        for problem in self._found.passed_over:
            self.note(f"damaged checkpoint passed over: {problem}")
        checkpoint = self._found.checkpoint
        if checkpoint is not None:
            engines.load(checkpoint)
        for key, (then, now) in set_anew(self.dir, self.config).items():
            self.note(f"set anew: {key} was {then} and is {now}")
        for told in abandon_after(self.dir, -1 if checkpoint is None else self.progress.step):
            self.note(told)
        write_config(self.dir, self.config)
        self.telling.at(self.progress.step)
        if checkpoint is None:
            self.note("no checkpoint to resume from: starting at step 0; what was recorded is under abandoned/")
        else:
            self.note(f"resumed from {checkpoint.folder.name}: {self.progress.step} steps done")

    def _loader_at(self, position: int) -> LoaderState:
        """The loader's state after the consumed samples; it may itself be ahead of them."""
        now = self.loader.state()
        size = self.loader.size
        return LoaderState(position // size, position % size, now.fingerprint, now.seed, now.batch_size, now.shuffle)

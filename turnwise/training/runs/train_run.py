"""One training run: how far it has come, when it ends, its checkpoints, and how it resumes after a stop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from rich.console import Console

from turnwise.config import Config
from turnwise.config.training import LAST, is_share
from turnwise.engines.rendering import make_renderer
from turnwise.errors import EngineError, StorageError
from turnwise.rollout.collector import Collected
from turnwise.storage.checkpoints import UnfinishedCheckpoint, begin_checkpoint
from turnwise.storage.final_policy import Evaluated, forget_best, keep_best, link_policy, read_best, ship
from turnwise.storage.run_dir import REUSED, RunDir, trajectory_file
from turnwise.storage.status import State
from turnwise.training.replay_buffer import ReplayEntry, candidates, choose, renew
from turnwise.training.run_engines import Engines
from turnwise.training.runs.python_arguments import write_given
from turnwise.training.runs.resumable_run import ResumableRun, open_run
from turnwise.training.runs.resume_config import resume_command
from turnwise.training.runs.state import Progress, RunState, read_state
from turnwise.types import Group, Sample, Trajectory

if TYPE_CHECKING:
    from turnwise.chat.images.processor import ImageProcessor
    from turnwise.data.loader import LoaderState


@dataclass(frozen=True, slots=True)
class Reused:
    """Groups of earlier steps, each with what the buffer knows of it; none where there is no buffer."""

    kept: list[ReplayEntry] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of all groups, in order."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def baselines(self, first: int) -> dict[int, float | None]:
        """remax: their greedy rewards, by an index that goes on from that of the step's new groups."""
        return {number: entry.baseline for number, entry in enumerate(self.kept, start=first)}

    def metrics(self, step: int, buffer: list[ReplayEntry]) -> dict[str, float]:
        """How much was trained on again, how old it is, and what the buffer holds afterwards."""
        counts = {"kept": len(buffer), "groups": len(self.groups), "trajectories": len(self.trajectories)}
        metrics = {f"replay/{name}": float(value) for name, value in counts.items()}
        if self.kept:
            ages = np.array([step - entry.step for entry in self.kept])
            metrics |= {"replay/age/mean": float(ages.mean()), "replay/age/max": float(ages.max())}
            metrics["replay/age/min"] = float(ages.min())
        return metrics


def reuse(directory: RunDir, config: Config, buffer: list[ReplayEntry], step: int) -> Reused:
    """The groups that this step trains on again, as their files have them; failed episodes are left aside."""
    chosen = choose(buffer, step, config.training, config.seed)
    by_step: dict[int, list[ReplayEntry]] = {}
    for entry in chosen:
        by_step.setdefault(entry.step, []).append(entry)
    groups = [group for recorded, entries in by_step.items() for group in _read(directory, recorded, entries)]
    return Reused(chosen, groups)  # `chosen` is in the order of steps too


def _read(directory: RunDir, step: int, entries: list[ReplayEntry]) -> Iterator[Group]:
    from turnwise.storage.trajectories.files import read_rows

    path = directory.path / trajectory_file(step)
    try:
        read = iter(read_rows(path, [row for entry in entries for row in range(entry.first, entry.first + entry.rows)]))
    except IndexError as error:
        raise StorageError(f"the replay buffer names trajectories that are not there: {error}") from error
    for entry in entries:
        whole = [next(read) for _ in range(entry.rows)]
        if len({trajectory.sample.id for trajectory in whole}) != 1:
            raise StorageError(
                f"{path}, rows {entry.first} to {entry.first + entry.rows - 1}: not one group, as was kept"
            )
        usable = [trajectory for trajectory in whole if trajectory.failure is None]
        for trajectory in usable:
            trajectory.reused_from, trajectory.advantage = step, None
            for ledger in trajectory.segments:
                ledger.training = None  # of the step that trained on it first
        yield Group(whole[0].sample, usable)


T = TypeVar("T")


class TrainRun(ResumableRun[RunState]):
    """Opened once per process; `progress` survives it."""

    def __init__(
        self, config: Config, directory: RunDir, console: Console, samples: list[Sample], *, resuming: bool
    ) -> None:
        from turnwise.data.loader import Loader

        self.progress = Progress()
        self.loader = Loader(samples, config.training.groups, config.seed, config.training.shuffle)
        self.first_step = True
        self.mid_update = False
        """While weights change, the learner's are not those of `progress`, and no checkpoint can be taken."""
        self._images: ImageProcessor | None = None
        """For images of earlier steps, which their files only name."""
        self._saved_step = 0
        self._writing: asyncio.Future[None] | None = None
        """The checkpoint that is being written."""
        self._best: Evaluated | None = None
        """The best evaluation of trained weights, which are kept or about to be."""
        self._is_best_kept = True
        steps, trackers = config.training.steps, config.tracking.to
        super().__init__(
            config, directory, "train", console, read_state, resuming=resuming, steps=steps, trackers=trackers
        )
        if self.found.checkpoint is not None:
            state = self.found.checkpoint.state
            self.loader.restore(state.loader)
            self.progress, self._saved_step = state.progress, state.progress.step
        if self.progress.best_of != config.training.metric:  # what was best by another number says nothing of this one
            self.progress.best = self.progress.best_step = None
            self.progress.best_of = config.training.metric
        self._step_started = self._started

    def is_over(self) -> bool:
        """Whether the run had come to its end and nothing is asked for that it has not done."""
        return self.progress.after is not None and not self.should_continue()

    def start_step(self) -> None:
        """From here on time is the next step's; evaluations and checkpoints between two steps belong to neither."""
        self._step_started = time.perf_counter()

    async def reuse(self) -> Reused:
        """What the present step trains on again, read from the run's files; nothing where no groups are kept."""
        from turnwise.storage.images.copies import prepare_again

        if not self.config.training.replay_groups:
            return Reused()
        reused = await self.recorder.do(reuse, self.dir, self.config, self.progress.replay, self.progress.step + 1)
        if any(ledger.media for trajectory in reused.trajectories for ledger in trajectory.segments):
            if self._images is None:
                self._images = (await asyncio.to_thread(make_renderer, self.config)).images
            prepare = None if self._images is None else self._images.prepare
            await self.recorder.do(prepare_again, self.dir.path, reused.trajectories, prepare)
        return reused

    async def record_step(self, trajectories: list[Trajectory], again: Reused) -> None:
        """Write the present step's new episodes, and apart from them those that it trained on again."""
        await self.recorder.record(trajectory_file(self.progress.step + 1), trajectories)
        if again.trajectories:
            await self.recorder.record(trajectory_file(self.progress.step + 1, REUSED), again.trajectories)

    def finish_step(self, collected: Collected, trajectories: list[Trajectory], again: Reused) -> dict[str, float]:
        """Count a step that learned from these groups, and from some again; returns metrics of the replay buffer."""
        self.first_step, self.mid_update = False, False
        self.progress.step += 1
        self.progress.prompt_batches += collected.prompt_batches
        self.progress.tokens += sum(turn.completion_tokens for t in trajectories for turn in t.every_turn)
        if not self.config.training.replay_groups:
            return {}
        step, progress = self.progress.step, self.progress
        new = candidates(collected.groups, step, collected.baselines)
        progress.replay = renew(progress.replay, again.kept, new, step, self.config.training)
        return again.metrics(step, progress.replay)

    def log_evaluation(self, numbers: dict[str, float], summary: str) -> None:
        """Log an evaluation and say it; the best so far is kept. One that scored nothing has no accuracy."""
        evaluated = Evaluated(self.progress.step, numbers, self.config.training.metric)
        value, best = evaluated.value, self.progress.best
        if value is not None and (best is None or value > best):
            self.progress.best, self.progress.best_step = value, self.progress.step
        self.progress.evaluated = self.progress.step
        self._note_best(evaluated)
        self.log({f"val/{name}": value for name, value in numbers.items() if not name.partition("/")[0].endswith("_n")})
        self.note(f"step {self.progress.step}: {summary}")
        if value is None and evaluated.accuracy is not None:
            self.note(f"training.ship: this evaluation has no {evaluated.metric}, and cannot be the best")

    def _note_best(self, new: Evaluated) -> None:
        if self.config.training.ship == LAST or not new.step or new.value is None:
            return
        if self._best is None or self._best.value is None or new.value > self._best.value:
            self._best, self._is_best_kept = new, False

    def timings(self, trajectories: list[Trajectory], update: float) -> dict[str, float]:
        """How long the step took and how fast it was; collection is what came before the update, or went on meanwhile
        where it may run ahead."""
        now = time.perf_counter()
        step = now - self._step_started
        tokens = sum(len(ledger) for t in trajectories for ledger in t.segments)
        written = sum(turn.completion_tokens for t in trajectories for turn in t.every_turn)
        return {
            "timing_s/step": step,
            "timing_s/update_actor": update,
            "timing_s/gen": step - update,
            "perf/total_num_tokens": float(tokens),
            "perf/throughput": tokens / step,
            "perf/sampler_tokens_per_second": written / (step if self.config.training.max_lag else step - update),
            **self.trackers.metrics(),
        }

    def log(self, metrics: dict[str, float]) -> None:
        """Add the step's line to metrics.jsonl, and send it to the trackers."""
        self.log_metrics(self.progress.step, self.progress.tokens, metrics)

    def should_continue(self) -> bool:
        """Whether another step is due; otherwise the status says why not."""
        training, progress = self.config.training, self.progress
        end, reason = State.FINISHED, ""
        if self.stopping.is_set():
            end, reason = State.STOPPED, "stopped by a signal"
        elif progress.step >= training.steps:
            reason = f"all {training.steps} steps done"
        elif training.target is not None and progress.best is not None and progress.best >= training.target:
            target = f"{training.target:.0%}" if is_share(training.metric) else f"{training.target:g}"
            reason = f"the target of {target} {training.metric} is reached"
        elif training.max_minutes is not None and self.seconds() >= 60 * training.max_minutes:
            end, reason = State.STOPPED, f"training.max_minutes={training.max_minutes:g} reached"
        elif training.max_tokens is not None and progress.tokens >= training.max_tokens:
            end, reason = State.STOPPED, f"training.max_tokens={training.max_tokens} reached"
        self.status.end, self.status.reason = end, reason
        return not reason

    def should_save(self) -> bool:
        """Whether a checkpoint between two steps is due; after the last step there is one anyway."""
        return self._is_multiple(self.config.training.save_every)

    def should_evaluate(self) -> bool:
        """Whether the evaluation between two steps is due and not done yet."""
        return self._is_multiple(self.config.training.eval_every) and self.progress.evaluated != self.progress.step

    def _is_multiple(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0 and self.progress.step != self.config.training.steps

    def seconds(self) -> float:
        """Wall time of the run, earlier processes included."""
        return self.progress.seconds + super().seconds()

    async def until_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
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

    # --- checkpoints --------------------------------------------------------------------------------------------

    async def save(self, engines: Engines) -> None:
        """Take a checkpoint of everything while collection goes on; nobody changes the learner meanwhile.

        What the learner itself writes later is waited for by the next save, or when the run ends.
        """
        await self._saved()
        begun = await self.recorder.do(engines.in_threads(self._begin_checkpoint), engines)
        self._writing = asyncio.ensure_future(self._finish_checkpoint(engines, begun, self.progress.step))
        if not engines.learner.saving:
            await self._saved()

    def _begin_checkpoint(self, engines: Engines) -> UnfinishedCheckpoint:
        progress = replace(self.progress, seconds=self.seconds())
        loader = self._loader_at(self.progress.prompt_batches * self.config.training.groups)
        whole = self.config.training.save_last or self.status.end is not State.FINISHED or self.progress.after is None

        def fill(target: Path) -> None:
            engines.save(target, progress, loader, whole=whole)

        return begin_checkpoint(self.dir, self.progress.step, fill)

    async def _finish_checkpoint(self, engines: Engines, begun: UnfinishedCheckpoint, step: int) -> None:
        try:
            if engines.learner.saving:
                await asyncio.to_thread(engines.learner.saved)
        except BaseException:
            await self.recorder.do(begun.drop)
            raise
        folder = await self.recorder.do(begun.finish, self.config.training.keep)
        self._saved_step = step
        self.note(f"checkpoint {folder}")
        if not self._is_best_kept and self._best is not None and self._best.step == step:
            await self._keep_best(self._best, lambda target: link_policy(folder, target))
        if self.progress.after is not None and self.progress.step == step:
            last = Evaluated(step, self.progress.after, self.config.training.metric)
            self.note(str(await self.recorder.do(ship, self.dir.path, self._best, last, folder)))

    async def keep_best(self, engines: Engines, *, saves_next: bool = False) -> None:
        """Keep the policy of the best evaluation, if it is new; where a checkpoint comes next, its files are taken."""
        if not self._is_best_kept and self._best is not None and not saves_next:
            await self._keep_best(self._best, engines.in_threads(engines.learner.save_policy))

    async def _keep_best(self, best: Evaluated, fill: Callable[[Path], None]) -> None:
        await self.recorder.do(keep_best, self.dir.path, best, fill)
        self._is_best_kept = True

    async def _saved(self) -> None:
        """Wait for the checkpoint that is being written; why it could not be is raised here, once."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    @asynccontextmanager
    async def checkpoint_on_failure(self, engines: Engines) -> AsyncIterator[None]:
        """A failure of the block costs no finished step: the last good state is saved before it is raised again."""
        try:
            yield
            await self._saved()
        except Exception:
            with suppress(StorageError, EngineError):  # the failure is the news, also when the disk is full
                await self._saved()
            if not self.mid_update and self.progress.step > self._saved_step:
                with suppress(StorageError, EngineError):  # a learner may be what has failed
                    await self.save(engines)
                    await self._saved()
                    self.note(f"resume with: {resume_command(self.dir.name, self.config)}")
            raise
        finally:
            if self._writing is not None:  # stopped at once: the folder has no name yet and is removed by the next
                self._writing.cancel()

    def resume(self, engines: Engines) -> None:
        """Load the newest whole checkpoint; a run without one starts anew in its directory."""
        if self.resuming:
            self.restore(engines.load, self.progress.step, keep_from=0)
            kept = read_best(self.dir.path)
            self._best = None if kept is None else replace(kept, metric=self.config.training.metric)
            if self._best is not None and self._best.step > self.progress.step:
                self._best = None
                forget_best(self.dir.path)
        self.start_trackers(resumed_at=self.progress.step)

    def _loader_at(self, position: int) -> "LoaderState":
        """The loader's state after the consumed samples; it may itself be ahead of them."""
        now = self.loader.state()
        size = self.loader.size
        return replace(now, epoch=position // size, position=position % size)


@contextmanager
def open_train_run(
    config: Config, console: Console, samples: list[Sample], parts: Mapping[str, str]
) -> Iterator[TrainRun]:
    """The run to resume, or a new one, held against other writers until the block ends."""

    def make(directory: RunDir, resuming: bool) -> TrainRun:
        return TrainRun(config, directory, console, samples, resuming=resuming)

    with open_run(config, "train", console, make) as run:
        if not run.resuming:
            write_given(run.dir, parts)
        yield run

"""Evaluation: samples in, scored groups out, a report and a run directory at the end."""

import contextlib
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from turnwise.assemble import Prepared, open_context, prepare
from turnwise.chat.selfcheck import render_problem
from turnwise.checks.start import check_before_run
from turnwise.config import Config, SamplingConfig
from turnwise.config_check import check_config
from turnwise.engines.devices import choose as choose_devices
from turnwise.errors import TurnwiseError
from turnwise.files import check_place
from turnwise.metrics import share
from turnwise.report import EpisodeResult, EvalReport, accuracies, grade_all, measured, summarise
from turnwise.rollout.collector import Collector
from turnwise.rollout.episode import RolloutContext
from turnwise.rollout.group import run_group
from turnwise.rollout.interaction_sessions import Interaction
from turnwise.rollout.tools.tool import Tool
from turnwise.run import Run, console_or_stderr, new_run, printer
from turnwise.scoring.failures import check_scoring
from turnwise.scoring.scorer import Scorer, apply_all, is_failed
from turnwise.source_report import SourceReport
from turnwise.stopping import run_stoppable
from turnwise.storage.recorder import Recorder
from turnwise.storage.run_dir import METRICS, check_free
from turnwise.storage.trajectories import write_jsonl
from turnwise.task_metrics import TASK, TaskMetrics, declared_by
from turnwise.types import Group, Sample, Trajectory

MIN_EPISODES = 8


def evaluate(
    config: Config,
    *,
    samples: Iterable[Sample] | None = None,
    tools: Sequence[Tool | Callable[..., object]] | None = None,
    scorer: Scorer | None = None,
    interaction: Interaction | type | None = None,
    console: Console | None = None,
) -> EvalReport:
    """Roll out and score the evaluation samples; record everything in a new run directory.

    `samples`, `tools`, `scorer` and `interaction` replace the configured ones; `interaction` is a class derived from
    BaseInteraction, or an object of one. Progress goes to `console` (standard error by default).
    """
    check_config(config)
    check_free(Path(config.runs_dir), config.run)
    if config.eval.dump_jsonl is not None:
        check_place(Path(config.eval.dump_jsonl), "eval.dump_jsonl")
    limit = config.eval.samples if samples is None else None
    prepared = prepare(
        config, "test", samples=samples, limit=limit, tools=tools, scorer=scorer, interaction=interaction
    )
    return run_stoppable(evaluate_prepared(prepared, console_or_stderr(console)))


async def evaluate_prepared(prepared: Prepared, console: Console) -> EvalReport:
    """The evaluation itself, for callers that have an event loop."""
    await check_before_run(prepared, say=printer(console))
    with new_run(prepared.config, "eval", console) as run:
        run.show_plan(prepared)
        report = await _evaluate_into(run, prepared)
        run.dir.write_json("eval/step_000000.json", report.as_json())
        run.dir.append_jsonl(METRICS, report.as_metrics())
        if prepared.config.eval.dump_jsonl is not None:
            write_jsonl(Path(prepared.config.eval.dump_jsonl), report.trajectories)
        return report


async def _evaluate_into(run: Run, prepared: Prepared) -> EvalReport:
    config, start = prepared.config, time.perf_counter()
    trajectories: list[Trajectory] = []
    try:
        async with open_context(prepared, say=run.note) as context:
            with _progress(run.console, len(prepared.samples) * config.eval.group_size) as seen:
                await play_all(prepared, context, trajectories, seen)
            seconds = time.perf_counter() - start
            if (problem := render_problem(trajectories)) is not None:
                run.note(f"warning: {problem}")
            results = await grade_all(trajectories, prepared.scoring.scorers)
            _keep_first_answers(results)
    finally:  # what was played is kept, also when the run is stopped half-way
        if trajectories:
            await run.recorder.record("eval/step_000000.parquet", trajectories)
    sources = _sources(results, declared_by(config.task))
    tokens = sum(turn.completion_tokens for trajectory in trajectories for turn in trajectory.every_turn)
    return EvalReport(run.dir.path, seconds, tokens / seconds, sources, trajectories)


async def measure(
    prepared: Prepared,
    make_context: Callable[[Prepared, SamplingConfig], RolloutContext],
    recorder: Recorder,
    step: int,
    *,
    greedy: bool,
) -> dict[str, float]:
    """Accuracy and what tasks measure in the middle of a training run, as sampled and, when asked for, greedily;
    recorded under eval/."""
    found: dict[str, float] = {}
    sampling = prepared.config.sampling
    ways = {"": sampling} | ({"greedy_": dataclasses.replace(sampling, temperature=0.0)} if greedy else {})
    for name, chosen in ways.items():
        trajectories: list[Trajectory] = []
        # Negative rounds: evaluation must not draw the noise of a training round.
        await play_all(prepared, make_context(prepared, chosen), trajectories, lambda trajectory: None, step=-1 - step)
        results = await grade_all(trajectories, prepared.scoring.scorers)
        _keep_first_answers(results)
        await recorder.record(f"eval/{name}step_{step:06d}.parquet", trajectories)
        if (problem := render_problem(trajectories)) is not None:  # training does not go on with a faulty record
            raise TurnwiseError(problem)
        for source, report in _sources(results, declared_by(prepared.config.task)).items():
            found |= {f"{name}{TASK}/{source}/{metric}": value for metric, value in report.task.items()}
            final, first = accuracies(entry for entry in results if entry.trajectory.sample.data_source == source)
            found |= measured(f"{name}accuracy", final, source) | measured(f"{name}first_accuracy", first, source)
        found |= measured(f"{name}accuracy", accuracies(results)[0])
    await recorder.do(recorder.run.write_json, f"eval/step_{step:06d}.json", found)
    return found


def _keep_first_answers(results: Iterable[EpisodeResult]) -> None:
    for entry in results:
        entry.trajectory.first_right = entry.first_right


async def play_all(
    prepared: Prepared,
    context: RolloutContext,
    trajectories: list[Trajectory],
    seen: Callable[[Trajectory], None],
    *,
    step: int = 0,
) -> None:
    """Play and score every sample; trajectories are added in the order of the samples."""
    config = prepared.config

    async def run(sample: Sample) -> Group:
        return await run_group(sample, size=config.eval.group_size, step=step, context=context)

    async def score(group: Group) -> None:
        await apply_all(prepared.scoring.scorers[group.sample.data_source], group.trajectories)
        for trajectory in group.trajectories:
            seen(trajectory)

    running, ahead = max(1, choose_devices(config).episodes // config.eval.group_size), len(prepared.samples)
    failures = Failures(config.rollout.max_failures)
    async with Collector(prepared.samples, run, running=running, ahead=ahead, score=score) as collector:
        while groups := await collector.next_groups(1):
            trajectories.extend(groups[0].trajectories)
            failures.check(groups[0].trajectories)
    check_scoring(trajectories, config.scoring.max_failures)


class Failures:
    """Counts episodes as they come, to stop a run that mostly fails and say why it does."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._episodes = self._failed = 0
        self._reasons: Counter[str] = Counter()

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Count more; TurnwiseError when too large a share of all so far failed."""
        failed = [trajectory.failure or "unknown" for trajectory in trajectories if is_failed(trajectory)]
        self._reasons.update(failed)
        self._failed += len(failed)
        self._episodes += len(trajectories)
        if self._episodes >= MIN_EPISODES and self._failed > self._allowed * self._episodes:
            commonest, count = self._reasons.most_common(1)[0]
            raise TurnwiseError(
                f"{self._failed} of {self._episodes} episodes failed (rollout.max_failures={self._allowed:g}); "
                f"most often ({count}): {commonest}"
            )


def _sources(results: list[EpisodeResult], declared: dict[str, TaskMetrics]) -> dict[str, SourceReport]:
    by_source: dict[str, list[EpisodeResult]] = defaultdict(list)
    for entry in results:
        by_source[entry.trajectory.sample.data_source].append(entry)
    return {source: summarise(source, entries, declared) for source, entries in sorted(by_source.items())}


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Trajectory], None]]:
    """A progress bar with the accuracy so far; yields what to call with each finished trajectory."""
    outcomes: list[tuple[str, bool]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("evaluating", total=total)

        def seen(trajectory: Trajectory) -> None:
            if trajectory.right is not None:
                outcomes.append((trajectory.sample.id, trajectory.right))
            progress.advance(bar)
            if len(outcomes) % max(1, total // 20) == 0 and (found := share(outcomes)) is not None:
                progress.update(bar, description=f"evaluating, {found} right")

        yield seen

"""Evaluation: samples in, scored groups out, a report and a run directory at the end."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from turnwise.chat.render_alignment import render_problem
from turnwise.config import Config
from turnwise.config.check import check_config
from turnwise.config.evaluation_sampling import evaluation_sampling
from turnwise.reports.evaluation import EvalReport, grade_all
from turnwise.reports.evaluation_run import by_source, keep_first_answers, play_all
from turnwise.reports.plan import plan_text
from turnwise.reports.task_metrics import declared_by
from turnwise.rollout.prepare import Prepared, open_context, prepare
from turnwise.rollout.tools.tool import Tool
from turnwise.rollout.users.user import UserLike
from turnwise.rollout.workers.players import check_workers, open_workers, played_by, workers_of
from turnwise.scoring.scorer import Scorer
from turnwise.storage.run_dir import METRICS, check_free
from turnwise.storage.trackers.notebook import progress_bars
from turnwise.system.metrics import share
from turnwise.system.stopping import run_stoppable
from turnwise.training.runs.run import Run, console_or_stderr, new_run, printer
from turnwise.types import Sample, Trajectory


def evaluate(
    config: Config,
    *,
    samples: Iterable[Sample] | None = None,
    tools: Sequence[Tool | Callable[..., object]] | None = None,
    scorer: Scorer | None = None,
    interaction: UserLike | None = None,
    console: Console | None = None,
) -> EvalReport:
    """Roll out and score the evaluation samples; record everything in a new run directory.

    `samples`, `tools`, `scorer` and `interaction` replace the configured ones; `interaction` is a class derived from
    BaseInteraction, or an object of one. Progress goes to `console` (standard error by default).
    """
    check_config(config)
    check_free(Path(config.runs_dir), config.run)
    limit = config.eval.samples if samples is None else None
    prepared = prepare(
        config,
        config.eval.split.value,
        samples=samples,
        limit=limit,
        tools=tools,
        scorer=scorer,
        interaction=interaction,
    )
    check_workers(prepared)
    return run_stoppable(evaluate_prepared(prepared, console_or_stderr(console)))


async def evaluate_prepared(prepared: Prepared, console: Console) -> EvalReport:
    """The evaluation itself, for callers that have an event loop."""
    from turnwise.reports.checks.run_checks import check_before_run

    await check_before_run(prepared, say=printer(console))
    with new_run(prepared.config, "eval", console) as run:
        run.show_plan(prepared, plan_text(prepared))
        report = await _evaluate_into(run, prepared)
        run.dir.write_json("eval/step_000000.json", report.as_json())
        run.dir.append_jsonl(METRICS, report.as_metrics())
        return report


async def _evaluate_into(run: Run, prepared: Prepared) -> EvalReport:
    config, start = prepared.config, time.perf_counter()
    trajectories: list[Trajectory] = []
    try:
        drawn, here = evaluation_sampling(config), not workers_of(prepared)
        async with (
            open_context(prepared, sampling=drawn, say=run.note, episodes=here) as opened,
            open_workers(config, [prepared], opened.sampler, run.note) as workers,
        ):
            context = played_by(workers, opened, prepared)
            with _progress(run.console, len(prepared.samples) * config.eval.group_size) as on_trajectory:
                await play_all(prepared, context, trajectories, on_trajectory)
            seconds = time.perf_counter() - start
            if (problem := render_problem(trajectories)) is not None:
                run.warn(problem)
            results = await grade_all(trajectories, prepared.scoring.scorers)
            keep_first_answers(results)
    finally:  # what was played is kept, also when the run is stopped half-way
        if trajectories:
            await run.recorder.record("eval/step_000000.parquet", trajectories)
    sources = by_source(results, declared_by(config.task))
    tokens = sum(turn.completion_tokens for trajectory in trajectories for turn in trajectory.every_turn)
    return EvalReport(run.dir.path, seconds, tokens / seconds, sources, trajectories)


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Trajectory], None]]:
    """A progress bar with the accuracy so far; yields what to call with each finished trajectory."""
    outcomes: list[tuple[str, bool]] = []
    with progress_bars(console) as progress:
        bar = progress.add_task("evaluating", total=total)

        def seen(trajectory: Trajectory) -> None:
            if trajectory.right is not None:
                outcomes.append((trajectory.sample.id, trajectory.right))
            progress.advance(bar)
            if len(outcomes) % max(1, total // 20) == 0 and (accuracy := share(outcomes)) is not None:
                progress.update(bar, description=f"evaluating, {accuracy} right")

        yield seen

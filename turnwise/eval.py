"""Evaluation: samples in, scored groups out, a report and a run directory at the end."""

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from turnwise.assemble import Prepared, open_stage, prepare
from turnwise.compose import to_yaml
from turnwise.config import Config, SamplingConfig
from turnwise.errors import TurnwiseError
from turnwise.plan_text import introduce
from turnwise.report import EvalReport, Judged, SourceReport, judge_all, summarise
from turnwise.rollout.collector import Collector
from turnwise.rollout.episode import Stage
from turnwise.rollout.group import run_group
from turnwise.rollout.tools.tool import Tool
from turnwise.scoring.failures import check_scoring
from turnwise.scoring.scorer import Scorer, apply_all, is_failed
from turnwise.storage.index import record
from turnwise.storage.run_dir import METRICS, RunDir
from turnwise.storage.status import Telling
from turnwise.storage.trajectories import write_jsonl
from turnwise.task_metrics import TaskMetrics, declared_by
from turnwise.types import Group, Sample, Trajectory

FEWEST_TO_JUDGE_FAILURES = 8


def evaluate(
    config: Config,
    *,
    samples: Iterable[Sample] | None = None,
    tools: Sequence[Tool | Callable[..., object]] | None = None,
    scorer: Scorer | None = None,
    console: Console | None = None,
) -> EvalReport:
    """Roll out and score the evaluation samples; record everything in a new run directory.

    `samples`, `tools` and `scorer` replace the configured ones. Progress goes to `console` (standard error by default).
    """
    prepared = prepare(config, "test", samples=samples, limit=config.eval.samples, tools=tools, scorer=scorer)
    return asyncio.run(evaluate_prepared(prepared, console or Console(stderr=True)))


async def evaluate_prepared(prepared: Prepared, console: Console) -> EvalReport:
    """The evaluation itself, for callers that have an event loop."""
    config = prepared.config
    run = RunDir.create(Path(config.runs_dir), config.run, "eval")
    run.write_text("config.yaml", to_yaml(config))
    with Telling(run, "eval"):
        return await _evaluate_into(run, prepared, console)


async def _evaluate_into(run: RunDir, prepared: Prepared, console: Console) -> EvalReport:
    config = prepared.config
    introduce(prepared, run, console)
    start = time.perf_counter()
    trajectories: list[Trajectory] = []
    try:
        async with open_stage(prepared, say=lambda text: _note(run, console, text)) as stage:
            with _progress(console, len(prepared.samples) * config.eval.group_size) as seen:
                await play_all(prepared, stage, trajectories, seen)
            seconds = time.perf_counter() - start
            judged = await judge_all(trajectories, prepared.scoring.scorers)
            _remember_first_answers(judged)
    finally:  # what was played is kept, also when the run is stopped half-way
        if trajectories:
            record(run, "eval/step_000000.parquet", trajectories)
    report = _report(run, seconds, judged, declared_by(config.task))
    run.write_json("eval/step_000000.json", report.as_json())
    run.append_jsonl(METRICS, report.as_metrics())
    if config.eval.dump_jsonl is not None:
        write_jsonl(Path(config.eval.dump_jsonl), trajectories)
    return report


def _note(run: RunDir, console: Console, text: str) -> None:
    run.log(text)
    console.print(text, markup=False, highlight=False)


async def measure(
    prepared: Prepared, make_stage: Callable[[Prepared, SamplingConfig], Stage], run: RunDir, step: int, *, greedy: bool
) -> dict[str, float]:
    """Accuracy in the middle of a training run, as sampled and, when asked for, greedily; recorded under eval/."""
    found: dict[str, float] = {}
    tasks: dict[str, float] = {}
    sampling = prepared.config.sampling
    ways = {"": sampling} | ({"greedy_": dataclasses.replace(sampling, temperature=0.0)} if greedy else {})
    for name, chosen in ways.items():
        trajectories: list[Trajectory] = []
        # Negative rounds: evaluation must not draw the noise of a training round.
        await play_all(prepared, make_stage(prepared, chosen), trajectories, lambda trajectory: None, step=-1 - step)
        judged = await judge_all(trajectories, prepared.scoring.scorers)
        _remember_first_answers(judged)
        record(run, f"eval/{name}step_{step:06d}.parquet", trajectories)
        for source in _sources(judged, declared_by(prepared.config.task)):
            tasks |= {f"{name}task/{source.data_source}/{metric}": value for metric, value in source.task.items()}
            found[f"{name}accuracy/{source.data_source}"] = source.accuracy or 0.0
            found[f"{name}first_accuracy/{source.data_source}"] = source.first_accuracy or 0.0
        right = [float(entry.right) for entry in judged if entry.right is not None]
        found[f"{name}accuracy"] = sum(right) / max(1, len(right))
    run.write_json(f"eval/step_{step:06d}.json", found | tasks)
    return found


def _remember_first_answers(judged: Iterable[Judged]) -> None:
    for entry in judged:
        entry.trajectory.first_right = entry.first_right


async def play_all(
    prepared: Prepared,
    stage: Stage,
    trajectories: list[Trajectory],
    seen: Callable[[Trajectory], None],
    *,
    step: int = 0,
) -> None:
    """Play and score every sample; trajectories are added in the order of the samples."""
    config = prepared.config

    async def run(sample: Sample) -> Group:
        group = await run_group(sample, size=config.eval.group_size, step=step, stage=stage)
        await apply_all(prepared.scoring.scorers[sample.data_source], group.trajectories)
        for trajectory in group.trajectories:
            seen(trajectory)
        return group

    running = max(1, config.rollout.concurrency // config.eval.group_size)
    async with Collector(prepared.samples, run, running=running, ahead=len(prepared.samples)) as collector:
        while groups := await collector.next_groups(1):
            trajectories.extend(groups[0].trajectories)
            check_failures(trajectories, config.rollout.max_failures)
    check_scoring(trajectories, config.scoring.max_failures)


def check_failures(trajectories: Sequence[Trajectory], allowed: float) -> None:
    """Stop a run that mostly fails, and say why it does."""
    failures = [trajectory.failure or "unknown" for trajectory in trajectories if is_failed(trajectory)]
    if len(trajectories) >= FEWEST_TO_JUDGE_FAILURES and len(failures) > allowed * len(trajectories):
        commonest, count = Counter(failures).most_common(1)[0]
        raise TurnwiseError(
            f"{len(failures)} of {len(trajectories)} episodes failed (rollout.max_failures={allowed:g}); "
            f"most often ({count}): {commonest}"
        )


def _report(run: RunDir, seconds: float, judged: list[Judged], declared: dict[str, TaskMetrics]) -> EvalReport:
    sources = _sources(judged, declared)
    tokens = sum(turn.completion_tokens for entry in judged for turn in entry.trajectory.turns)
    return EvalReport(run.path, seconds, tokens / seconds, sources, [entry.trajectory for entry in judged])


def _sources(judged: list[Judged], declared: dict[str, TaskMetrics]) -> list[SourceReport]:
    by_source: dict[str, list[Judged]] = defaultdict(list)
    for entry in judged:
        by_source[entry.trajectory.sample.data_source].append(entry)
    return [summarise(source, entries, declared) for source, entries in sorted(by_source.items())]


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Trajectory], None]]:
    """A progress bar with the accuracy so far; yields what to call with each finished trajectory."""
    right = finished = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("evaluating", total=total)

        def seen(trajectory: Trajectory) -> None:
            nonlocal right, finished
            finished += 1
            right += bool(trajectory.right)
            progress.update(bar, advance=1, description=f"evaluating, {100 * right / finished:.0f}% right")

        yield seen

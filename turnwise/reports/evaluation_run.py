"""Held-out samples played, scored and counted: what `eval`, `train` and probes measure with."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from turnwise.chat.render_alignment import render_problem
from turnwise.config import SamplingConfig
from turnwise.config.evaluation_sampling import evaluation_sampling
from turnwise.engines.devices import choose as choose_devices
from turnwise.errors import TurnwiseError
from turnwise.reports.data_sources import SourceReport
from turnwise.reports.evaluation import (
    EpisodeResult,
    accuracies,
    grade_all,
    measured,
    repeated_numbers,
    rewards,
    summarise,
)
from turnwise.reports.pass_at_k import most_repeated, repeated_answers
from turnwise.reports.task_metrics import TASK, TaskMetrics, declared_by
from turnwise.rollout.collector import Collector, run_group, score_group
from turnwise.rollout.episode import RolloutContext
from turnwise.rollout.prepare import Prepared
from turnwise.scoring.failures import check_scoring
from turnwise.scoring.scorer import is_failed
from turnwise.storage.recorder import Recorder
from turnwise.types import Group, Sample, Trajectory

MIN_EPISODES = 8
"""Fewer say nothing about the share that fails."""


async def measure(
    prepared: Prepared,
    make_context: Callable[[Prepared, SamplingConfig], RolloutContext],
    recorder: Recorder,
    step: int,
    *,
    greedy: bool,
) -> dict[str, float]:
    """Accuracy, reward and what tasks measure within a training run, as sampled and, when asked for, greedily; recorded
    under eval/."""
    numbers: dict[str, float] = {}
    sampling = evaluation_sampling(prepared.config)
    ways = {"": sampling} | ({"greedy_": dataclasses.replace(sampling, temperature=0.0)} if greedy else {})
    for name, drawn in ways.items():
        trajectories: list[Trajectory] = []
        # Negative rounds: evaluation must not draw the noise of a training round.
        await play_all(prepared, make_context(prepared, drawn), trajectories, lambda trajectory: None, step=-1 - step)
        results = await grade_all(trajectories, prepared.scoring.scorers)
        keep_first_answers(results)
        await recorder.record(f"eval/{name}step_{step:06d}.parquet", trajectories)
        if (problem := render_problem(trajectories)) is not None:  # training does not go on with a faulty record
            raise TurnwiseError(problem)
        for source, report in by_source(results, declared_by(prepared.config.task)).items():
            numbers |= {f"{name}{TASK}/{source}/{metric}": value for metric, value in report.task.items()}
            own = [entry for entry in results if entry.trajectory.sample.data_source == source]
            final, first = accuracies(own)
            numbers |= rewards(f"{name}reward", (entry.trajectory for entry in own), source)
            numbers |= measured(f"{name}accuracy", final, source) | measured(f"{name}first_accuracy", first, source)
            numbers |= {} if name else repeated_numbers(report.repeated, source)
        numbers |= measured(f"{name}accuracy", accuracies(results)[0]) | rewards(f"{name}reward", trajectories)
        # Greedily, a sample's episodes repeat each other.
        numbers |= {} if name else repeated_numbers(most_repeated(repeated_answers(trajectories)))
    await recorder.do(recorder.run.write_json, f"eval/step_{step:06d}.json", numbers)
    return numbers


def keep_first_answers(results: Iterable[EpisodeResult]) -> None:
    """Write on every trajectory whether its first answer was right."""
    for entry in results:
        entry.trajectory.first_right = entry.first_right


async def play_all(
    prepared: Prepared,
    context: RolloutContext,
    trajectories: list[Trajectory],
    report: Callable[[Trajectory], None],
    *,
    step: int = 0,
) -> None:
    """Play and score every sample; trajectories are added in the order of the samples."""
    config = prepared.config

    async def run(sample: Sample) -> Group:
        return await run_group(sample, range(config.eval.group_size), step=step, context=context)

    async def score(group: Group) -> None:
        await score_group(group, prepared.scoring, context)
        for trajectory in group.trajectories:
            report(trajectory)

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


def by_source(results: Sequence[EpisodeResult], declared: Mapping[str, TaskMetrics]) -> dict[str, SourceReport]:
    """The numbers of every data source, by its name."""
    entries: dict[str, list[EpisodeResult]] = defaultdict(list)
    for entry in results:
        entries[entry.trajectory.sample.data_source].append(entry)
    return {source: summarise(source, own, declared) for source, own in sorted(entries.items())}

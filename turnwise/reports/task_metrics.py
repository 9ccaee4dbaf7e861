"""Metrics that tasks declare for themselves, each with its reduction and under the name of its data source.

The metrics of a built-in task belong to its data source wherever that turns up; those of a run's own task to all other
data sources of the run, or to the one it names.
"""

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.data.task import Task, builtin_tasks, is_own, load_task
from turnwise.errors import PluginError
from turnwise.errors.nearest_name import unknown
from turnwise.scoring.scorer import is_failed
from turnwise.system.metrics import Metric, Reduction
from turnwise.types import Trajectory

TASK = "task"
"""How the names of all of them begin; in an evaluation within training `val/task/SOURCE/NAME`."""
ANY = "default"
"""The key of metrics for data sources that have none of their own."""
COUNT = "episodes"
"""Declared for every task: how many trajectories its numbers are made of."""


@dataclass(frozen=True, slots=True)
class TaskMetrics:
    """What one task measures: the declared names with their reductions, and the function that observes them."""

    task: str
    reductions: Mapping[str, Reduction]
    observe: Callable[[Trajectory], Mapping[str, float]]

    def of(self, trajectory: Trajectory) -> Iterator[Metric]:
        """The observations of one trajectory, checked against the declaration."""
        source = trajectory.sample.data_source
        yield Metric(f"{TASK}/{source}/{COUNT}", 1, Reduction.SUM)
        for name, value in self.observe(trajectory).items():
            if name not in self.reductions:
                raise PluginError(f"task {self.task}: {unknown('metric', str(name), self.reductions)} (reductions)")
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise PluginError(f"task {self.task}: metric {name!r} is {value!r:.80}; it must be a finite number")
            yield Metric(f"{TASK}/{source}/{name}", float(value), self.reductions[name])


def declared_by(task: str | None) -> dict[str, TaskMetrics]:
    """The metrics of a run's own task by data source, checked; nothing for a built-in one, which is always known."""
    if task is None or not is_own(task):
        return {}
    loaded = load_task(task)
    metrics = _read(loaded, task)
    return {} if metrics is None else dict.fromkeys((loaded.data_source or ANY, *loaded.further_sources), metrics)


def observe(trajectories: Iterable[Trajectory], declared: Mapping[str, TaskMetrics] | None = None) -> Iterator[Metric]:
    """All that tasks measure in these trajectories; failed ones say nothing about the policy and are left out."""
    by_source = {**_builtin(), **(declared or {})}
    for trajectory in trajectories:
        chosen = by_source.get(trajectory.sample.data_source) or by_source.get(ANY)
        if chosen is not None and not is_failed(trajectory):
            yield from chosen.of(trajectory)


def names_of(source: str, declared: Mapping[str, TaskMetrics]) -> list[str]:
    """The names of what is measured in episodes of a data source."""
    by_source = {**_builtin(), **declared}
    chosen = by_source.get(source) or by_source.get(ANY)
    return [] if chosen is None else [COUNT, *chosen.reductions]


@functools.cache
def _builtin() -> dict[str, TaskMetrics]:
    tasks = {name: load_task(name) for name in builtin_tasks()}
    read = {name: _read(task, name) for name, task in tasks.items()}
    return {source: metrics for name, metrics in read.items() if metrics is not None for source in tasks[name].sources}


def _read(task: Task, name: str) -> TaskMetrics | None:
    if task.metrics is None and not task.reductions:
        return None
    if task.metrics is None or not task.reductions:
        raise PluginError(f"task {name}: a metric needs both its entry in reductions and the function metrics")
    _check(task.reductions, name)
    return TaskMetrics(name, task.reductions, task.metrics)


def _check(reductions: Mapping[str, Any], task: str) -> None:
    for name, reduction in reductions.items():
        # Data sources may hold slashes; names without keep task/SOURCE/NAME apart for any two tasks.
        if not isinstance(name, str) or not name or "/" in name or name == COUNT:
            raise PluginError(f"task {task}: the metric name {name!r} is empty, has a slash or is {COUNT!r}")
        if not isinstance(reduction, Reduction):
            raise PluginError(f"task {task}: reductions[{name!r}] must be a Reduction, not {reduction!r:.80}")

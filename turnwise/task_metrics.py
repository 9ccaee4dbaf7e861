"""Metrics that a task declares for itself, each with its reduction and under the name of its data source.

A task module has `METRICS = {"retries": Reduction.MEAN}` and `def metrics(trajectory) -> dict[str, float]`; a
trajectory may leave out names that say nothing about it. `DATA_SOURCE` says whose trajectories they are. The metrics
of a built-in task belong to its data source wherever that turns up; those of a run's own task (`task=module:rows`)
to all others of the run, or to its DATA_SOURCE when it names one.
"""

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from turnwise.errors import PluginError, unknown
from turnwise.metrics import Metric, Reduction
from turnwise.plugins import load, names_in
from turnwise.scoring.scorer import is_failed
from turnwise.types import Trajectory

TASKS_PACKAGE = "turnwise.tasks"
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
        yield Metric(f"task/{source}/{COUNT}", 1, Reduction.SUM)
        for name, value in self.observe(trajectory).items():
            if name not in self.reductions:
                raise PluginError(f"task {self.task}: {unknown('metric', str(name), self.reductions)} (METRICS)")
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise PluginError(f"task {self.task}: metric {name!r} is {value!r:.80}; it must be a finite number")
            yield Metric(f"task/{source}/{name}", float(value), self.reductions[name])


def declared_by(task: str | None) -> dict[str, TaskMetrics]:
    """The metrics of a run's own task by data source, checked; nothing for a built-in one, which is always known."""
    if task is None or ":" not in task:
        return {}
    rows = load(task, "task")
    module = import_module(rows.__module__)
    found = _read(module, task)
    return {} if found is None else {getattr(module, "DATA_SOURCE", ANY): found}


def observe(trajectories: Iterable[Trajectory], declared: Mapping[str, TaskMetrics] | None = None) -> Iterator[Metric]:
    """All that tasks measure in these trajectories; failed ones say nothing about the policy and are left out."""
    known = {**_builtin(), **(declared or {})}
    for trajectory in trajectories:
        chosen = known.get(trajectory.sample.data_source) or known.get(ANY)
        if chosen is not None and not is_failed(trajectory):
            yield from chosen.of(trajectory)


@functools.cache
def _builtin() -> dict[str, TaskMetrics]:
    modules = [import_module(f"{TASKS_PACKAGE}.{name}") for name in names_in(TASKS_PACKAGE)]
    read = {getattr(module, "DATA_SOURCE", None): _read(module, module.__name__) for module in modules}
    return {source: found for source, found in read.items() if source is not None and found is not None}


def _read(module: ModuleType, task: str) -> TaskMetrics | None:
    reductions, function = getattr(module, "METRICS", None), getattr(module, "metrics", None)
    if reductions is None:
        return None
    if not callable(function):
        raise PluginError(f"task {task} declares METRICS but has no function metrics(trajectory)")
    _check(reductions, task)
    return TaskMetrics(task, reductions, function)


def _check(reductions: Any, task: str) -> None:
    if not isinstance(reductions, Mapping):
        raise PluginError(f"task {task}: METRICS is a dict of names to reductions, not {type(reductions).__name__}")
    for name, reduction in reductions.items():
        # Data sources may hold slashes; names without keep task/SOURCE/NAME apart for any two tasks.
        if not isinstance(name, str) or not name or "/" in name or name == COUNT:
            raise PluginError(f"task {task}: the metric name {name!r} is empty, has a slash or is {COUNT!r}")
        if not isinstance(reduction, Reduction):
            raise PluginError(f"task {task}: METRICS[{name!r}] must be a Reduction, not {reduction!r:.80}")

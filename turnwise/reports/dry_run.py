"""`turnwise train --dry-run`: plan, who is on which node, memory and an estimate of the time; nothing is written.

The time is that of a recorded run of the same work, or of a step tried now; no rate is ever assumed. A recorded run
counts when nothing that changes the work differs: its model, its episodes, its engine, and the machine as its plan
names it.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from turnwise.config import Config
from turnwise.config.environment import uses
from turnwise.config.sections import knob_for
from turnwise.data.loader import Loader
from turnwise.data.task_config import compose, differences
from turnwise.engines.host_memory import host_memory
from turnwise.engines.memory_plan import memory_here
from turnwise.engines.opener import opener_of
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.extensions import extensions
from turnwise.reports.checks.run_checks import check_before_run
from turnwise.reports.evaluation_names import check_shipping
from turnwise.reports.plan import plan_text
from turnwise.rollout.collector import Groups
from turnwise.rollout.placement import placement_of
from turnwise.rollout.prepare import Prepared
from turnwise.scoring.failures import check_scoring
from turnwise.storage.run_dir import CONFIG, METRICS, PLAN, RunDir
from turnwise.storage.status import read_status
from turnwise.training.optimise import beside_policy
from turnwise.training.run_engines import open_engines
from turnwise.training.runs.prepare_training import prepare_training
from turnwise.training.runs.resume_config import existing_run
from turnwise.training.runs.trust import check_run
from turnwise.training.sequences import to_sequences, trainable

MEASURED_GROUPS = 8
"""Groups of a step that is tried out."""
LEAST_STEPS = 3
"""Recorded steps from which rates are taken; the first is left out, which warms up."""
_MACHINE = ("engine ", "memory ")
"""How the lines of a plan begin that name the machine."""


def _changes_work(key: str) -> bool:
    """Whether an episode or an update takes another time with another value of the key."""
    knob = knob_for(key)
    return knob is None or bool(knob.marks.get("changes_work", key.partition(".")[0] in extensions()))


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds for one episode, and where they are from."""

    step: float
    """Played, scored and learnt from."""
    learning: float | None
    """Of these; None where no episode could be learnt from."""
    evaluating: float | None
    """Played and scored in an evaluation; None where none was timed."""
    source: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """An estimate in seconds; `seconds` is the whole run, or what is left of one."""

    steps: int
    episodes: int
    """Of a step."""
    step_seconds: float
    learning_seconds: float | None
    """Of a step."""
    passes: int
    """Over the held-out samples."""
    pass_seconds: float | None
    """None where no evaluation was timed: they are not in the estimate."""
    seconds: float
    source: str
    ends_by: float | None = None
    """training.max_minutes, where that comes first."""

    def lines(self) -> Iterator[str]:
        """The forecast in words, line by line."""
        learning = "no" if self.learning_seconds is None else shown(self.learning_seconds)
        passes = "not counted, none was timed" if self.pass_seconds is None else f"{shown(self.pass_seconds)} each"
        whole = shown(self.seconds)
        if self.ends_by is not None:
            whole = f"{shown(self.ends_by)} (training.max_minutes; {whole} without)"
        yield (
            f"about {whole}: {self.steps} steps of {self.episodes} episodes, {shown(self.step_seconds)} each "
            f"({learning} learning), and {self.passes} evaluations, {passes}; starting and saving are not counted"
        )
        yield f"an estimate, {self.source}"

    def as_json(self) -> dict[str, Any]:
        """The forecast as values that JSON can hold."""
        return asdict(self)


def shown(seconds: float) -> str:
    """A duration for people: `42 s`, `17 min`, `5.2 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def forecast(config: Config, heldout: int, rates: Rates, *, done: int = 0) -> Forecast:
    """The time of the steps that are left after `done`, one after the other, and of evaluating `heldout` samples."""
    training, steps = config.training, max(0, config.training.steps - done)
    episodes = training.groups * training.group_size
    between = (steps - 1) // training.eval_every if training.eval_every and steps else 0
    passes = between + (2 if done else 4)  # before and after, sampled and greedy
    one_pass = None if rates.evaluating is None else heldout * config.eval.group_size * rates.evaluating
    step = episodes * rates.step
    whole = steps * step + passes * (one_pass or 0.0)
    limit = None if training.max_minutes is None else 60 * training.max_minutes
    ends_by = limit if limit is not None and limit < whole else None
    learning = None if rates.learning is None else episodes * rates.learning
    return Forecast(steps, episodes, step, learning, passes, one_pass, whole, rates.source, ends_by)


def recorded_rates(config: Config, heldout: int, plan: str) -> Rates | None:
    """Those of the newest run in runs_dir that did the same work on the same machine; None where there is none."""
    folder = Path.cwd() / config.runs_dir
    runs = [path.parent for path in folder.glob(f"*/{METRICS}")] if folder.is_dir() else []
    for run in sorted(runs, key=lambda path: (path / METRICS).stat().st_mtime, reverse=True):
        try:
            rates = _rates_of(RunDir(run), config, heldout, plan)
        except (TurnwiseError, OSError):  # another release's run, a damaged one or no run at all: it tells us nothing
            continue
        if rates is not None:
            return rates
    return None


def _rates_of(run: RunDir, config: Config, heldout: int, plan: str) -> Rates | None:
    status = read_status(run)
    if status is None or status.command != "train" or _machine(run.read_text(PLAN)) != _machine(plan):
        return None
    check_run(run, trusted=False)
    if any(_changes_work(key) for key in differences(run.path / CONFIG, config)):
        return None
    then, lines = (
        compose([], recorded=run.path / CONFIG).config,
        [line for line in run.read_jsonl(METRICS) if _is_line(line)],
    )
    timed = [line for line in lines if _is_number(line.get("timing_s/step"))][1:]
    if len(timed) < LEAST_STEPS - 1:
        return None
    episodes = then.training.groups * then.training.group_size
    step = statistics.fmean(line["timing_s/step"] for line in timed) / episodes  # a step may have waited for two
    updates = [line["timing_s/update_actor"] for line in timed if _is_number(line.get("timing_s/update_actor"))]
    learning = statistics.fmean(updates) / episodes if updates else None
    # All were evaluated where the same number was asked for: the data are the same.
    samples = heldout if then.eval.samples == config.eval.samples else then.eval.samples
    evaluating = None if samples is None else _evaluating(lines, samples * then.eval.group_size)
    day = time.strftime("%Y-%m-%d", time.localtime(status.updated))
    return Rates(step, learning, evaluating, f"from the rates of {len(timed)} steps of the run {run.name} ({day})")


def _evaluating(lines: list[dict[str, Any]], episodes: int) -> float | None:
    """Seconds for an episode of the evaluations that followed a step: one pass, or two where there was a greedy one."""
    seconds = []
    for before, line in pairwise(lines):
        if "val/accuracy" in line and "timing_s/step" in before:
            passes = 2 if "val/greedy_accuracy" in line else 1
            seconds.append((line["seconds"] - before["seconds"]) / passes / episodes)
    return statistics.median(seconds) if seconds else None


def _machine(plan: str) -> list[str]:
    return [line for line in plan.splitlines() if line.startswith(_MACHINE)]


def _is_line(line: object) -> bool:
    return isinstance(line, dict) and _is_number(line.get("seconds"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


async def measured_rates(prepared: Prepared, say: Callable[[str], None]) -> Rates:
    """Those of a part of a step, played and learnt from now; nothing is kept, neither episodes nor weights."""
    config = prepared.config
    count = min(config.training.groups, MEASURED_GROUPS)
    part = replace(config, training=replace(config.training, groups=count, max_lag=0, drop_constant_groups=False))
    loader = Loader(prepared.samples, count, config.seed, config.training.shuffle)
    async with prepared.running(say), open_engines(config, prepared, say) as engines:
        await engines.publish(0)
        groups = Groups(engines, replace(prepared, config=part), loader, 0)
        start = time.perf_counter()
        async with groups.collector:
            collected = await groups.next_step(0)
        played = time.perf_counter()
        trajectories = [trajectory for group in collected.groups for trajectory in group.trajectories]
        check_scoring(trajectories, config.scoring.max_failures)
        sequences = to_sequences(collected.groups)
        learns = bool(trainable(sequences))
        if learns:
            await engines.update(sequences, part, 0, collected.baselines)
            await engines.publish(1)
        learnt = time.perf_counter()
    lag = "; collecting overlaps with learning where each has a device of its own" if config.training.max_lag else ""
    source = f"measured just now with {count} groups of {config.training.group_size}, warm-up included{lag}"
    collecting, learning = (played - start) / len(trajectories), (learnt - played) / len(trajectories)
    return Rates(collecting + learning, learning if learns else None, collecting, source)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a training would be: its plan, its memory and how long it would take."""

    plan: str
    memory: tuple[str, ...]
    """Of the CPU, where it computes; a GPU's is in the plan."""
    nodes: tuple[str, ...]
    """Of a cluster: what each would hold."""
    forecast: Forecast
    as_json: dict[str, Any]

    def text(self) -> str:
        """The whole report, as it is printed."""
        parts = (("nodes", self.nodes), ("memory", self.memory), ("estimate", tuple(self.forecast.lines())))
        lines = [f"{'' if number else name:13}{line}" for name, section in parts for number, line in enumerate(section)]
        return self.plan + "\n".join(lines) + "\nnothing was written\n"


async def dry_run(config: Config, say: Callable[[str], None]) -> DryRun:
    """Everything that `train` does before its first step, and a part of one where no run was recorded."""
    prepared, heldout, _ = prepare_training(config, None, None, tools=None, scorer=None, interaction=None)
    check_shipping(heldout)
    layout = await placement_of(config).layout(training=True)
    if layout is not None and (lacking := layout.lacking) is not None:  # what is tried below would wait
        for line in layout.nodes:
            say(line)
        raise ConfigError(f"--dry-run: the cluster has no room now: {lacking}")
    await check_before_run(prepared, heldout, say=say)
    plan, nodes = plan_text(prepared, training=True), () if layout is None else tuple(layout.nodes)
    run = existing_run(config, "train")
    status = None if run is None else read_status(run)
    rates = recorded_rates(config, len(heldout.samples), plan)
    if rates is None and opener_of(config).keeps_weights(config):
        raise ConfigError(
            "--dry-run: there is no earlier run with these settings, and a measurement would load other weights "
            "into servers that stay running; `turnwise check` prints the plan without an estimate"
        )
    if rates is None:
        say("there is no earlier run with these settings: part of a step is run now to measure the time")
        rates = await measured_rates(prepared, lambda text: None)
    estimate = forecast(config, len(heldout.samples), rates, done=0 if status is None else status.step)
    host = host_memory(config, beside_policy(config))
    gpu, memory = memory_here(config, beside_policy(config)), () if host is None else tuple(host.lines())
    values = {
        "profile": config.profile,
        "plan": plan.splitlines(),
        "environment": [str(use) for use in uses(config)],
        "memory": {"gpu": None if gpu is None else gpu.as_json(), "cpu": list(memory)},
        "nodes": list(nodes),
        "estimate": estimate.as_json(),
    }
    return DryRun(plan, memory, nodes, estimate, values)

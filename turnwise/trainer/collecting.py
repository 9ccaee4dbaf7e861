"""What a training step learns from: samples drawn in order, rolled out in groups and scored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from turnwise.assemble import Prepared
from turnwise.choices import Advantage
from turnwise.data.loader import Loader
from turnwise.engines.devices import choose as choose_devices
from turnwise.rollout.collector import Collector
from turnwise.rollout.episode import run_episode
from turnwise.rollout.group import run_group
from turnwise.scoring.scorer import apply, apply_all
from turnwise.trainer.engines import Engines
from turnwise.training.shaping import keep_varied
from turnwise.training.staleness import age_of
from turnwise.types import Group, Sample, Trajectory

MOST_DRAWS = 3
"""Times `training.groups` samples that a step may draw until enough groups differ in reward."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One sample to roll out, and the batch that it was drawn in; the batch is part of its noise."""

    batch: int
    sample: Sample


class SampleStream:
    """The samples in the loader's order, as far as collection may run ahead. A gate: it yields again once widened."""

    def __init__(self, loader: Loader, first_batch: int, batches_allowed: int) -> None:
        self._loader = loader
        self._batch = first_batch
        self._allowed = batches_allowed
        self._waiting: list[Sample] = []

    def __iter__(self) -> "SampleStream":
        return self

    def __next__(self) -> Draw:
        if not self._waiting:
            if self._batch >= self._allowed:
                raise StopIteration
            self._waiting = list(next(self._loader))
            self._batch += 1
        return Draw(self._batch - 1, self._waiting.pop(0))

    def allow(self, prompt_batches: int) -> None:
        """Let collection run up to this many batches of prompts in all."""
        self._allowed = prompt_batches


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of one step, and how many batches of prompts they took."""

    groups: list[Group]
    baselines: dict[int, float | None]
    """remax: the greedy reward by index of the group."""
    prompt_batches: int
    metrics: dict[str, float]
    """How collecting and scoring went meanwhile."""


class Groups:
    """Rolls out the stream and hands a step its groups. `allow` is called when new weights have been published."""

    def __init__(self, engines: Engines, prepared: Prepared, loader: Loader, first_batch: int) -> None:
        self._config, self._scoring, self._engines = prepared.config, prepared.scoring, engines
        self._context = engines.context(prepared, self._config.sampling)
        wanted = self._config.algorithm.advantage == Advantage.remax
        self._greedy = engines.context(prepared, replace(self._config.sampling, temperature=0.0)) if wanted else None
        self._alone: dict[int, Trajectory] = {}
        """remax: the greedy rollout by its group's id."""
        self._stream = SampleStream(loader, first_batch, first_batch + 1 + self._config.training.max_lag)
        running = max(1, choose_devices(self._config).episodes // self._config.training.group_size)
        self.collector: Collector[Draw] = Collector(
            self._stream, self._play, running=running, ahead=1 << 30, score=self._score
        )

    def allow(self, prompt_batches: int) -> None:
        """Let collection run up to this many batches of prompts in all, `max_lag` ahead of them included."""
        self._stream.allow(prompt_batches + 1 + self._config.training.max_lag)
        self.collector.fill()

    async def next_step(self, first_batch: int) -> Collected:
        """The next step's groups; with dynamic sampling, batches are drawn until enough groups differ in reward.

        A step waits for its groups, however long their episodes take: nothing is left out for being slow.
        """
        training, collector = self._config.training, self.collector
        most = MOST_DRAWS if training.drop_constant_groups else 1
        waited, drawn, stale = collector.unfinished(training.groups), 0, 0
        kept: list[Group] = []
        alone: dict[int, Trajectory | None] = {}
        for prompt_batches in range(1, most + 1):
            groups = await collector.next_groups(training.groups)
            alone |= {id(group): self._alone.pop(id(group), None) for group in groups}
            drawn, stale = drawn + len(groups), stale + leave_out_stale(groups, self._engines.version, training.max_lag)
            kept += keep_varied(groups).kept if training.drop_constant_groups else groups
            if len(kept) >= training.groups:
                break
            if prompt_batches < most:
                self.allow(first_batch + prompt_batches)
        chosen = kept[: training.groups]
        greedy = [alone[id(group)] for group in chosen]
        baselines = {number: None if one is None else one.reward for number, one in enumerate(greedy)}
        counted = {"waited_for": waited, "ahead": collector.finished, "drawn": drawn, "left_out": drawn - len(chosen)}
        metrics = {f"groups/{name}": float(number) for name, number in counted.items()}
        metrics["staleness/left_out"] = float(stale)
        return Collected(chosen, baselines, prompt_batches, metrics | self._scoring.metrics())

    async def _play(self, draw: Draw) -> Group:
        size = self._config.training.group_size
        group = await run_group(draw.sample, size=size, step=draw.batch, context=self._context)
        if self._greedy is not None:
            self._alone[id(group)] = await run_episode(draw.sample, sibling=size, step=draw.batch, context=self._greedy)
        return group

    async def _score(self, group: Group) -> None:
        scorer = self._scoring.scorers[group.sample.data_source]
        await apply_all(scorer, group.trajectories)
        if self._greedy is not None:
            await apply(scorer, self._alone[id(group)])


def leave_out_stale(groups: Sequence[Group], version: int, max_lag: int) -> int:
    """Let episodes fail that hold tokens older than `max_lag` steps; returns how many.

    The order of collecting makes none, so they come from an engine that did not take the weights it was given.
    """
    found = 0
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        age = age_of(trajectory, version)
        if trajectory.failure is None and age > max_lag:
            trajectory.failure = f"stale: tokens of weights {age} step(s) old, training.max_lag={max_lag}"
            trajectory.reward, trajectory.parts = None, {}
            found += 1
    return found

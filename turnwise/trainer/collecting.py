"""What a training step learns from: samples drawn in order, rolled out in groups and scored."""

from dataclasses import dataclass, replace

from turnwise.assemble import Prepared
from turnwise.choices import Advantage
from turnwise.data.loader import Loader
from turnwise.rollout.collector import Collector
from turnwise.rollout.episode import run_episode
from turnwise.rollout.group import run_group
from turnwise.scoring.scorer import apply, apply_all
from turnwise.trainer.stage import TrainingStage
from turnwise.training.shaping import keep_varied
from turnwise.types import Group, Sample, Trajectory


@dataclass(frozen=True, slots=True)
class Draw:
    """One sample to roll out, and the round that it was drawn in; the round is part of its noise."""

    round: int
    sample: Sample


class Draws:
    """The samples in the loader's order, as far as collection may run ahead. A gate: it yields again once widened."""

    def __init__(self, loader: Loader, first_round: int, rounds_allowed: int) -> None:
        self._loader = loader
        self._round = first_round
        self._allowed = rounds_allowed
        self._waiting: list[Sample] = []

    def __iter__(self) -> "Draws":
        return self

    def __next__(self) -> Draw:
        if not self._waiting:
            if self._round >= self._allowed:
                raise StopIteration
            self._waiting = list(next(self._loader))
            self._round += 1
        return Draw(self._round - 1, self._waiting.pop(0))

    def allow(self, rounds: int) -> None:
        """Let collection run up to this many rounds in all."""
        self._allowed = rounds


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of one step, and how many rounds of samples they took."""

    groups: list[Group]
    baselines: dict[int, float | None]
    """remax: the greedy reward by index of the group."""
    rounds: int
    scoring: dict[str, float]
    """Metrics of how scoring went meanwhile."""


class Groups:
    """Plays draws and hands a step its groups. `allow` is called when new weights have been published."""

    def __init__(self, engines: TrainingStage, prepared: Prepared, draws: Draws) -> None:
        self._config, self._scoring = prepared.config, prepared.scoring
        self._stage = engines.stage(prepared, self._config.sampling)
        wanted = self._config.algorithm.advantage is Advantage.remax
        self._greedy = engines.stage(prepared, replace(self._config.sampling, temperature=0.0)) if wanted else None
        self._alone: dict[int, Trajectory] = {}
        """remax: the greedy rollout by its group's id."""
        self._draws = draws
        running = max(1, self._config.rollout.concurrency // self._config.training.group_size)
        self.collector: Collector[Draw] = Collector(
            draws, self._play, running=running, ahead=1 << 30, score=self._score
        )

    def allow(self, rounds: int) -> None:
        """Let collection run up to this many rounds in all, `max_lag` ahead of them included."""
        self._draws.allow(rounds + 1 + self._config.training.max_lag)
        self.collector.fill()

    async def next_step(self, first_round: int) -> Collected:
        """The next step's groups; with dynamic sampling, rounds are drawn until enough groups differ in reward."""
        training = self._config.training
        most = training.max_draws if training.drop_constant_groups else 1
        kept: list[Group] = []
        alone: dict[int, Trajectory | None] = {}
        for rounds in range(1, most + 1):
            groups = await self.collector.next_groups(training.groups)
            alone |= {id(group): self._alone.pop(id(group), None) for group in groups}
            kept += keep_varied(groups).kept if training.drop_constant_groups else groups
            if len(kept) >= training.groups:
                break
            if rounds < most:
                self.allow(first_round + rounds)
        chosen = kept[: training.groups]
        greedy = [alone[id(group)] for group in chosen]
        baselines = {number: None if one is None else one.reward for number, one in enumerate(greedy)}
        return Collected(chosen, baselines, rounds, self._scoring.metrics())

    async def _play(self, draw: Draw) -> Group:
        size = self._config.training.group_size
        group = await run_group(draw.sample, size=size, step=draw.round, stage=self._stage)
        if self._greedy is not None:
            self._alone[id(group)] = await run_episode(draw.sample, sibling=size, step=draw.round, stage=self._greedy)
        return group

    async def _score(self, group: Group) -> None:
        scorer = self._scoring.scorers[group.sample.data_source]
        await apply_all(scorer, group.trajectories)
        if self._greedy is not None:
            await apply(scorer, self._alone[id(group)])

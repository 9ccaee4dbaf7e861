"""A run's scorers: which one each data source gets, with its options and weights, and the runner that runs them."""

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, unknown
from turnwise.scoring.failures import ScoringStats, counted, within
from turnwise.scoring.judge.judge import take_metrics
from turnwise.scoring.loop_resources import close_loop_resources
from turnwise.scoring.scorer import Score, Scorer, ScorerSpec, evaluate, name_of
from turnwise.scoring.sources import spec_for
from turnwise.scoring.truths import check_truths
from turnwise.types import Sample, StopReason, Trajectory


class Runner(Protocol):
    """How scorers are run. Each file of turnwise/scoring/runners has one, made from the config."""

    stats: ScoringStats
    """What it went through, for the metrics."""

    def scorer(self, spec: ScorerSpec) -> Scorer:
        """The scorer as this runner runs it; names and options are checked now, nothing is started."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Called on every path."""
        ...


class Scoring:
    """The scorers by data source, and the runner behind them."""

    def __init__(self, runner: Runner, scorers: dict[str, Scorer]) -> None:
        self.runner = runner
        self.scorers = scorers

    @classmethod
    def of(
        cls,
        config: ScoringConfig,
        sources: Sequence[str],
        own: Scorer | None = None,
        *,
        known: Mapping[str, str] | None = None,
        runner: Runner | None = None,
    ) -> "Scoring":
        """What the config asks for, and else the scorers that tasks are `known` by; `own` replaces all, as it is.
        `runner` is the one that the config names, or another instead."""
        runner = runner or make_runner(config)
        if own is not None:
            return cls(
                runner,
                dict.fromkeys(sources, _as_configured(counted(within(own, config.timeout), runner.stats), config)),
            )
        named = {source: spec_for(source, config.scorers, known) for source in sources}
        unused = set(config.scorers) - {*sources, "default"}
        if unused:
            raise ConfigError(f"scoring.scorers: no sample has the {unknown('data source', min(unused), sources)}")
        idle = {key for key in config.options if not any(_means(key, name) for name in named.values())}
        if idle:
            hint = unknown("scorer", min(idle), named.values())
            raise ConfigError(f"scoring.options: no data source has the {hint}")
        made = {name: runner.scorer(ScorerSpec(name, _options(config, name))) for name in named.values()}
        return cls(runner, {source: _as_configured(made[name], config) for source, name in named.items()})

    def scorer_for(self, source: str, config: ScoringConfig, *, known: Mapping[str, str] | None = None) -> Scorer:
        """That of a data source which may be new: rows that another trainer brings are not known beforehand."""
        if source not in self.scorers:
            name = spec_for(source, config.scorers, known)
            made = self.runner.scorer(ScorerSpec(name, _options(config, name)))
            self.scorers[source] = _as_configured(made, config)
        return self.scorers[source]

    @staticmethod
    def check(config: ScoringConfig, samples: Sequence[Sample], *, known: Mapping[str, str] | None = None) -> None:
        """DataError for a sample without the ground truth that its scorer needs."""
        for source in sorted({sample.data_source for sample in samples}):
            name = spec_for(source, config.scorers, known)
            spec = ScorerSpec(name, _options(config, name))
            check_truths(spec, (sample for sample in samples if sample.data_source == source))

    def metrics(self) -> dict[str, float]:
        """What scoring went through since this was last asked, the judges' requests included."""
        return self.runner.stats.take() | take_metrics()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Between start and stop."""
        try:
            await self.runner.start()
            yield
        finally:
            try:
                await self.runner.stop()
            finally:
                await close_loop_resources()  # what scorers opened when they first needed it


def _options(config: ScoringConfig, name: str) -> dict[str, Any]:
    return {
        key: value for given, found in config.options.items() if _means(given, name) for key, value in found.items()
    }


def _means(key: str, scorer: str) -> bool:
    """Options name a scorer as `scoring.scorers` does, by its path without the folder, or by the function alone."""
    return scorer == key or scorer.endswith(f"/{key}") or scorer.rpartition(":")[2] == key


def make_runner(config: ScoringConfig) -> Runner:
    """The runner the config names."""
    make: Callable[[ScoringConfig], Runner] = import_module(f"turnwise.scoring.runners.{config.run.value}").make
    return make(config)


def _as_configured(scorer: Scorer, config: ScoringConfig) -> Scorer:
    return _with_agent_errors(weighted(scorer, config.weights), config.agent_error)


def _with_agent_errors(scorer: Scorer, reward: float | None) -> Scorer:
    """The scorer, but for episodes whose agent raised because of what the policy wrote: their reward is this one, and
    of their parts only the names are the scorer's."""
    if reward is None:
        return scorer
    name = name_of(scorer)

    async def score(trajectory: Trajectory) -> Score:
        said = await evaluate(scorer, trajectory)
        if trajectory.stop_reason is not StopReason.AGENT_ERROR:
            return said
        return Score(reward, dict.fromkeys(said.parts, 0.0), remarks=said.remarks)

    score.__qualname__ = name
    return score


def weighted(scorer: Scorer, weights: Mapping[str, float]) -> Scorer:
    """The scorer with its parts weighed; a weight for a part that it does not have is an error."""
    if not weights:
        return scorer
    for part, weight in weights.items():
        if not math.isfinite(weight):
            raise ConfigError(f"scoring.weights.{part} must be a finite number, not {weight}")
    name = name_of(scorer)

    async def weigh(trajectory: Trajectory) -> Score:
        found = await evaluate(scorer, trajectory)
        for part in weights:
            if part not in found.parts:
                raise ConfigError(f"scoring.weights, scorer {name}: {unknown('part', part, found.parts)}")
        reward = sum(weights.get(part, 1.0) * value for part, value in found.parts.items())
        return Score(reward, found.parts, found.turns, found.remarks)

    weigh.__qualname__ = name
    return weigh

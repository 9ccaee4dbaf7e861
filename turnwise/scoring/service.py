"""A run's scorers: which one each data source gets, the truth it compares with, and the runner that runs them."""

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, DataError
from turnwise.errors.nearest_name import unknown
from turnwise.extensions import named
from turnwise.scoring.event_loop_resources import close_loop_resources, take_metrics
from turnwise.scoring.failures import ScoringStats, counted, within
from turnwise.scoring.scorer import Score, Scorer, ScorerSpec, evaluate, name_of
from turnwise.system.plugins import load
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
        """Ends the runner; called on every path, after an error too."""
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
        task_scorers: Mapping[str, str] | None = None,
        runner: Runner | None = None,
    ) -> "Scoring":
        """What the config asks for, and else the scorers that tasks bring (`task_scorers`); `own` replaces all, as it
        is. `runner` is the one that the config names, or another instead."""
        runner = runner or make_runner(config)
        if own is not None:
            return cls(
                runner,
                dict.fromkeys(sources, _as_configured(counted(within(own, config.timeout), runner.stats), config)),
            )
        named = {source: spec_for(source, config.scorers, task_scorers) for source in sources}
        unused = set(config.scorers) - {*sources, "default"}
        if unused:
            raise ConfigError(
                f"scoring.scorers names a source of no sample: {unknown('data source', min(unused), sources)}"
            )
        idle = {key for key in config.options if not any(_means(key, name) for name in named.values())}
        if idle:
            hint = unknown("scorer", min(idle), named.values())
            raise ConfigError(f"scoring.options names a scorer that no data source uses: {hint}")
        scorers = {name: runner.scorer(ScorerSpec(name, _options(config, name))) for name in named.values()}
        return cls(runner, {source: _as_configured(scorers[name], config) for source, name in named.items()})

    def scorer_for(
        self, source: str, config: ScoringConfig, *, task_scorers: Mapping[str, str] | None = None
    ) -> Scorer:
        """That of a data source which may be new: rows that another trainer brings are not known beforehand."""
        if source not in self.scorers:
            name = spec_for(source, config.scorers, task_scorers)
            scorer = self.runner.scorer(ScorerSpec(name, _options(config, name)))
            self.scorers[source] = _as_configured(scorer, config)
        return self.scorers[source]

    @staticmethod
    def check(
        config: ScoringConfig, samples: Sequence[Sample], *, task_scorers: Mapping[str, str] | None = None
    ) -> None:
        """DataError for a sample without the ground truth that its scorer needs."""
        for source in sorted({sample.data_source for sample in samples}):
            name = spec_for(source, config.scorers, task_scorers)
            spec = ScorerSpec(name, _options(config, name))
            check_truths(spec, (sample for sample in samples if sample.data_source == source))

    def metrics(self) -> dict[str, float]:
        """What scoring went through since this was last asked, with what its resources counted."""
        return self.runner.stats.take() | take_metrics()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts the runner for the block, and ends it and what scorers opened after it."""
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
        key: value
        for pattern, options in config.options.items()
        if _means(pattern, name)
        for key, value in options.items()
    }


def _means(key: str, scorer: str) -> bool:
    """Options name a scorer as `scoring.scorers` does, by its path without the folder, or by the function alone."""
    return scorer == key or scorer.endswith(f"/{key}") or scorer.rpartition(":")[2] == key


def make_runner(config: ScoringConfig) -> Runner:
    """The runner that `scoring.run` of the config names."""
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
        result = await evaluate(scorer, trajectory)
        if trajectory.stop_reason is not StopReason.AGENT_ERROR:
            return result
        return Score(reward, dict.fromkeys(result.parts, 0.0), remarks=result.remarks)

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
        result = await evaluate(scorer, trajectory)
        for part in weights:
            if part not in result.parts:
                raise ConfigError(f"scoring.weights, scorer {name}: {unknown('part', part, result.parts)}")
        reward = sum(weights.get(part, 1.0) * value for part, value in result.parts.items())
        return Score(reward, result.parts, result.turns, result.remarks)

    weigh.__qualname__ = name
    return weigh


_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
KNOWN = {
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **{f"numina_{name}": "math" for name in _NUMINA},
    **{f"searchR1_{name}": "search_qa" for name in _SEARCH},
}
"""The scorer of data sources that neither `scoring.scorers` nor a task covers; extensions bring more (`sources`)."""


def spec_for(data_source: str, scorers: Mapping[str, str], of_tasks: Mapping[str, str] | None = None) -> str:
    """The scorer's name for a data source: its own entry, then "default", then its task's or the known one."""
    public = KNOWN | named("sources", KNOWN)
    by_source = public | dict(of_tasks or {})
    for table, key in ((scorers, data_source), (scorers, "default"), (by_source, data_source)):
        if key in table:
            return table[key]
    for family, name in public.items():
        if family.endswith("*") and data_source.startswith(family[:-1]):
            return name
    hint = unknown("data source", data_source[:80], [*scorers, *by_source])
    raise ConfigError(f"no scorer: {hint} Name one with scoring.scorers, or one for all under the key default.")


READERS = {
    "gsm8k": "turnwise.scoring.rules.gsm8k:truth_number",
    "gsm8k_strict": "turnwise.scoring.rules.gsm8k:truth_text",
    "gsm8k_flexible": "turnwise.scoring.rules.gsm8k:truth_text",
    "exact_match": "turnwise.scoring.rules.text_match:text_of",
    "text_match": "turnwise.scoring.rules.text_match:texts_of",
    "search_qa": "turnwise.scoring.rules.text_match:texts_of",
    "math": "turnwise.scoring.rules.math_boxed:golds_of",
}
"""What reads a sample's ground truth for a scorer; extensions name theirs in the table (`truths`)."""
ReadTruth = Callable[[Sample], Any]


def truth_reader(spec: ScorerSpec) -> ReadTruth | None:
    """What reads the ground truth that this scorer compares with; None where it reads none."""
    brought = named("truths", READERS)
    if spec.name in brought:
        choose: Callable[[Mapping[str, Any]], ReadTruth | None] = load(brought[spec.name], "scorer")
        return choose(spec.options)
    return load(READERS[spec.name], "scorer") if spec.name in READERS else None


def check_truths(spec: ScorerSpec, samples: Iterable[Sample]) -> None:
    """DataError for the first sample whose ground truth this scorer could not read."""
    read = truth_reader(spec)
    if read is None:
        return
    for sample in samples:
        try:
            read(sample)
        except DataError as error:
            raise DataError(f"scorer {spec.name}: {error}") from error

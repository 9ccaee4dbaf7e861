"""Scorers in actors: each hosts the configured runner on its node, and a trajectory goes to the least busy one."""

import json
from contextlib import AsyncExitStack
from typing import Any

from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, EngineLost
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import SearchPath, joined
from turnwise.ext.ray.workers import Workers, shared
from turnwise.scoring.client_options import check_processes
from turnwise.scoring.event_loop_resources import take_counts
from turnwise.scoring.failures import ScoringStats, retry_policy, score_retrying
from turnwise.scoring.runners.wire import score_to_wire
from turnwise.scoring.scorer import Score, Scorer, ScorerSpec
from turnwise.scoring.service import Runner, make_runner
from turnwise.scoring.worker_replies import read_answer
from turnwise.storage.trajectories.rows import from_row, to_row
from turnwise.system.metrics import Metric, reduce
from turnwise.system.retrying import AttemptFailed
from turnwise.types import Trajectory

SCORER_CALLS = 256
"""Trajectories that one actor works on at once; what its runner allows of them runs."""


class ScorerActor:
    """Scores by the runner of the config, in its own process or in a pool of its own. Made an actor by `Connection`."""

    def __init__(self, path: SearchPath, config: ScoringConfig) -> None:
        path.enter()
        self._config = config
        self._runner: Runner
        self._scorers: dict[str, Scorer] = {}

    async def beat(self) -> None:
        """A sign of life, by a thread of its own."""

    async def open(self) -> None:
        """Starts the runner; returns when it can score."""
        self._runner = make_runner(self._config)
        await self._runner.start()

    async def score(self, key: str, trajectory: bytes) -> tuple[bytes, list[Metric]]:
        """A scorer's name and options, and a row of JSON in; the answer and what scorers counted meanwhile out."""
        scorer = self._scorers.get(key)
        if scorer is None:
            scorer = self._scorers[key] = self._runner.scorer(ScorerSpec(*json.loads(key)))
        answer = await score_to_wire(scorer, from_row(json.loads(trajectory)))
        return json.dumps(answer).encode(), take_counts()


class ClusterStats(ScoringStats):
    """What the runner went through, and what scorers on other nodes counted, such as a judge's requests."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[Metric] = []

    def take(self) -> dict[str, float]:
        """The metrics since they were last taken."""
        counts, self.counts = self.counts, []
        return super().take() | reduce(counts)


class ClusterRunner:
    """Runs scorers in actors of the cluster. Implements `Runner`."""

    def __init__(self, cluster: RayConfig, scoring: ScoringConfig) -> None:
        self._counted = ClusterStats()
        self.stats: ScoringStats = self._counted
        self._cluster, self._scoring = cluster, scoring
        self._open = AsyncExitStack()
        self._workers: Workers | None = None

    def scorer(self, spec: ScorerSpec) -> Scorer:
        """Names and options are checked here, nothing is started."""
        spec.make()
        check_processes(spec, "cluster=ray")
        try:
            key = _key(spec.name, spec.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"scoring.options of {spec.name} cannot be given to another process: {error}") from error

        async def scorer(trajectory: Trajectory) -> Score:
            row = json.dumps(to_row(trajectory)).encode()
            policy = retry_policy(max(self._scoring.retries, 1))
            return await score_retrying(lambda: self._attempt(key, row), policy, self.stats, scorer=spec.name)

        scorer.__qualname__ = spec.name
        return scorer

    async def start(self) -> None:
        """Returns when the first actor can score."""
        connection = await joined(self._cluster)
        make = connection.actor(
            ScorerActor, cpus=self._cluster.service_cpus, gpus=0, concurrency=SCORER_CALLS, scheduling_strategy="SPREAD"
        )
        path, config = SearchPath.here(), self._scoring

        def workers() -> Workers:
            return Workers(connection, "scorer", lambda: make(path, config), self._cluster.scorers)

        self._workers = await self._open.enter_async_context(shared(connection, f"scorer {config}", workers))

    async def stop(self) -> None:
        self._workers = None
        await self._open.aclose()

    async def _attempt(self, key: str, row: bytes) -> Score:
        if self._workers is None:
            raise RuntimeError("the scorers of the cluster are not running")
        worker = await self._workers.take()
        try:
            with self.stats.timed():
                async with self._workers.working(worker) as actor:
                    answer, counts = await actor.score.remote(key, row)
        except EngineLost as error:
            failed = AttemptFailed(str(error))
            failed.at_once = True
            raise failed from error
        self._counted.counts += counts
        return read_answer(answer).score()


def _key(name: str, options: dict[str, Any]) -> str:
    return json.dumps([name, options], sort_keys=True)

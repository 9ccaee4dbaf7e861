"""What asking a judge may cost in one run, counted before each request, and what happens when it is spent."""

from collections.abc import Mapping
from typing import Any

from turnwise.errors import ConfigError, ScoringFailed, TurnwiseError
from turnwise.ext.judge.settings import BUDGETS, JudgeSettings, WhenSpent
from turnwise.ext.judge.stats import JudgeStats
from turnwise.system.metrics import Metric, Reduction


class Budget:
    """Requests and tokens that one judge took since the run started; verdicts from the cache cost nothing."""

    def __init__(self, settings: JudgeSettings, stats: JudgeStats) -> None:
        self._settings, self._stats = settings, stats
        self._requests = 0
        self._tokens = 0

    def take_request(self) -> None:
        """Count one that is about to be sent. Spent, it is ScoringFailed or, with `when_spent=stop`, the run's end."""
        spent = [f"{name}={most}" for name, used, most in self._used() if used >= most]
        if not spent:
            self._requests += 1
            return
        self._stats.over_budget += 1
        problem = f"the judge's budget is spent ({', '.join(spent)})"
        if self._settings.when_spent is WhenSpent.stop:
            raise TurnwiseError(f"{problem}: resume the run to go on with a new budget of the same size")
        raise ScoringFailed(problem)

    def take_tokens(self, count: int | None) -> None:
        """Count those of a reply; ConfigError where a limit is set and the server does not say how many they were."""
        if count is None and self._settings.max_tokens_total is not None:
            raise ConfigError("judge: max_tokens_total is set, and an endpoint does not count tokens: set max_requests")
        self._tokens += count or 0

    def metrics(self) -> list[Metric]:
        """What is left of each limit that is set."""
        left = {"max_requests": "requests_left", "max_tokens_total": "tokens_left"}
        return [
            Metric(f"judge/{left[name]}", float(max(0, most - used)), Reduction.SUM)
            for name, used, most in self._used()
        ]

    def _used(self) -> list[tuple[str, int, int]]:
        """(limit, used, most) of those that are set."""
        limits = zip(BUDGETS, (self._requests, self._tokens), strict=True)
        rows = ((name, used, getattr(self._settings, name)) for name, used in limits)
        return [(name, used, most) for name, used, most in rows if most is not None]


def refuse_budget(options: Mapping[str, Any], where: str) -> None:
    """A budget is one process's: ConfigError for options of a scorer with a judge that several processes would run."""
    for table in (options, *(value for value in options.values() if isinstance(value, Mapping))):
        for name in BUDGETS:
            if table.get(name) is not None:
                raise ConfigError(
                    f"judge: {name}={table[name]} is counted in this process, but {where} asks from other processes; "
                    "set scoring.run=inline"
                )

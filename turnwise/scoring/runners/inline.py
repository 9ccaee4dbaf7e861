"""The `inline` runner: scorers are called where they are needed."""

from turnwise.config import ScoringConfig
from turnwise.scoring.failures import ScoringStats, counted, within
from turnwise.scoring.scorer import Scorer, ScorerSpec


class InlineRunner:
    """Nothing to start, nothing to stop."""

    def __init__(self, seconds: float) -> None:
        self.stats = ScoringStats()
        self._seconds = seconds

    def scorer(self, spec: ScorerSpec) -> Scorer:
        return counted(within(spec.make(), self._seconds), self.stats)

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None


def make(config: ScoringConfig) -> InlineRunner:
    """The runner for `scoring.run=inline`."""
    return InlineRunner(config.timeout)

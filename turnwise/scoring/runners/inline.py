"""The `inline` runner: scorers are called where they are needed."""

from turnwise.config import ScoringConfig
from turnwise.scoring.failures import ScoringStats, counted
from turnwise.scoring.scorer import Scorer, ScorerSpec


class InlineRunner:
    """Nothing to start, nothing to stop."""

    def __init__(self) -> None:
        self.stats = ScoringStats()

    def scorer(self, spec: ScorerSpec) -> Scorer:
        return counted(spec.make(), self.stats)

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None


def make(config: ScoringConfig) -> InlineRunner:
    """The runner for `scoring.run=inline`."""
    return InlineRunner()

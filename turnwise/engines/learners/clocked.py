"""A learner whose work is marked on the clock of its device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from turnwise.engines.device_clock import DeviceClock
from turnwise.engines.learners.learner import Floats, Learner, UpdateResult, Who
from turnwise.engines.learners.objective import Objective
from turnwise.engines.learners.token_batch import TokenBatch
from turnwise.engines.updates import FullWeights, StoredWeights


class ClockedLearner:
    """Implements `Learner` by another one; what it does between two calls, such as packing, is not marked."""

    def __init__(self, learner: Learner, clock: DeviceClock) -> None:
        self._learner, self._clock = learner, clock

    @property
    def step(self) -> int:
        """How many times the weights have changed."""
        return self._learner.step

    @property
    def token_budget(self) -> int:
        """Tokens of one pass that it has room for."""
        return self._learner.token_budget

    def score(self, batch: TokenBatch, who: Who) -> Floats:
        """One number for every policy token."""
        with self._marked():
            return self._learner.score(batch, who)

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> UpdateResult:
        """One optimizer step."""
        with self._marked():
            return self._learner.update(batches, objective)

    def weights(self) -> FullWeights | StoredWeights:
        """The policy's weights."""
        return self._learner.weights()

    def save(self, folder: Path) -> None:
        """Everything needed to go on."""
        self._learner.save(folder)

    @property
    def saving(self) -> bool:
        """Whether that is still being written."""
        return self._learner.saving

    def saved(self) -> None:
        """Wait until it is."""
        self._learner.saved()

    def load(self, folder: Path) -> None:
        """Go on from a saved state."""
        self._learner.load(folder)

    def save_policy(self, folder: Path) -> None:
        """The policy as others load it."""
        self._learner.save_policy(folder)

    def save_adapter(self, folder: Path) -> bool:
        """The adapter alone."""
        return self._learner.save_adapter(folder)

    def close(self) -> None:
        """End what it runs elsewhere."""
        self._learner.close()

    @contextmanager
    def _marked(self) -> Iterator[None]:
        span = self._clock.begin()
        try:
            yield
        finally:
            self._clock.end(span)

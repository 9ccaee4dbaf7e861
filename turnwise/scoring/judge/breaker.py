"""A circuit breaker: an endpoint that keeps failing is left alone for a while, then tried by one request."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Closed lets everything pass; open nothing; after `seconds` one request passes and decides."""

    failures: int
    """In a row, that open it."""
    seconds: float
    clock: Callable[[], float] = time.monotonic
    _in_a_row: int = 0
    _opened: float | None = None
    _trying: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the endpoint counts as broken."""
        return self._opened is not None

    @property
    def is_trying(self) -> bool:
        """Whether a request is under way that will decide."""
        return self._trying

    @property
    def allows(self) -> bool:
        """Whether a request may pass now."""
        if self._opened is None:
            return True
        return not self._trying and self.clock() - self._opened >= self.seconds

    def begin(self) -> None:
        """A request that was allowed sets out."""
        self._trying = self._opened is not None

    def succeeded(self) -> None:
        """The endpoint answered."""
        self._in_a_row, self._opened, self._trying = 0, None, False

    def failed(self) -> None:
        """The endpoint did not do its work."""
        self._in_a_row += 1
        if self._trying or self._in_a_row >= self.failures:
            self._opened = self.clock()
        self._trying = False

    def abandoned(self) -> None:
        """The request was given up by its caller; nothing was learnt."""
        self._trying = False

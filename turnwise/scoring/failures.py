"""Failures of the machinery of scoring: how they are retried, counted, and when there are too many of them."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from turnwise.errors import ScoringFailed, TurnwiseError
from turnwise.scoring.scorer import SCORING, Score, Scorer, evaluate, is_failed, name_of, raised_by
from turnwise.system.retrying import AttemptFailed, RetryPolicy, retrying
from turnwise.types import Trajectory

LONGEST_WAIT = 10.0
PATIENCE = 20
LONGEST_ASKED_WAIT = 60.0
"""Of what a server may ask for with Retry-After."""

T = TypeVar("T")


@dataclass(slots=True)
class ScoringStats:
    """What a runner went through, in trajectories: `ScoringStats(calls=64, attempts=66, retries=2)`.

    `failures` are those left without a score. `seconds` is the time scorers took, waiting for their turn left out.
    """

    calls: int = 0
    attempts: int = 0
    retries: int = 0
    failures: int = 0
    seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of one attempt."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - start

    def split_off(self) -> "ScoringStats":
        """What was counted so far, which is not counted here any more."""
        counts = ScoringStats(**{field.name: getattr(self, field.name) for field in fields(self)})
        for field in fields(self):
            setattr(self, field.name, field.default)
        return counts

    def add(self, other: "ScoringStats") -> None:
        """Count what another process counted."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def take(self) -> dict[str, float]:
        """The metrics since they were last taken; empty when nothing was scored."""
        since = self.split_off()
        counts = {field.name: float(getattr(since, field.name)) for field in fields(self)}
        if not counts["calls"]:
            return {}
        rates = {
            "failure_rate": counts["failures"] / counts["calls"],
            "retry_rate": counts["retries"] / max(counts["attempts"], 1.0),
        }
        return {f"{SCORING}/{name}": value for name, value in (counts | rates).items()}


def retry_policy(retries: int, first_wait: float = 0.0) -> RetryPolicy:
    """How often and after which waits a runner tries again."""
    return RetryPolicy(retries, first_wait, LONGEST_WAIT, LONGEST_ASKED_WAIT)


async def score_retrying(
    attempt: Callable[[], Awaitable[T]], policy: RetryPolicy, stats: ScoringStats, *, scorer: str, count: int = 1
) -> T:
    """What the attempt returns, after AttemptFailed tried again and counted; in the end ScoringFailed.

    `count` trajectories hang on it. Whatever else the scorer raises is a failure too, and not tried again; only a
    TurnwiseError passes.
    """
    made = 0

    async def counted_attempt() -> T:
        nonlocal made
        stats.attempts += count
        stats.retries += count if made else 0
        made += 1
        return await attempt()

    stats.calls += count
    try:
        return await retrying(counted_attempt, policy)
    except ScoringFailed:  # the scorer has its own machinery, and has retried it in its own way
        stats.failures += count
        raise
    except TurnwiseError:
        raise
    except AttemptFailed as error:
        stats.failures += count
        raise ScoringFailed(f"{error} (attempt {error.attempts} of {policy.retries + 1})") from error
    except (Exception, SystemExit) as error:
        stats.failures += count
        raise raised_by(scorer, error) from error


def counted(scorer: Scorer, stats: ScoringStats) -> Scorer:
    """A scorer that runs where it is called, counted as the others are."""

    async def count(trajectory: Trajectory) -> Score:
        async def attempt() -> Score:
            with stats.timed():
                return await evaluate(scorer, trajectory)

        return await score_retrying(attempt, retry_policy(0), stats, scorer=name_of(scorer))

    count.__qualname__ = name_of(scorer)
    return count


def within(scorer: Scorer, seconds: float) -> Scorer:
    """The scorer with a limit of time where it is called: PATIENCE times what one trajectory may take, since it waits
    there for its turn too. ScoringFailed when it is over. One that blocks can only be stopped in a process."""
    name, most = name_of(scorer), PATIENCE * seconds

    async def score(trajectory: Trajectory) -> float | dict[str, float] | Score:
        try:
            async with asyncio.timeout(most) as limit:
                return await scorer(trajectory)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ScoringFailed(
                f"scorer {name} took longer than {most:g} s, {PATIENCE} times scoring.timeout"
            ) from error

    score.__qualname__ = name
    return score


def scoring_failed(trajectory: Trajectory) -> bool:
    """Whether the episode went well and scoring it did not."""
    return trajectory.failure is not None and trajectory.failure.startswith(f"{SCORING}:")


def check_scoring(trajectories: Sequence[Trajectory], allowed: float) -> None:
    """Stop a run whose rewards cannot be had: TurnwiseError when more than this share of a step's scorings failed.

    Episodes that failed by themselves were never scored and do not count.
    """
    failures = [trajectory.failure or "" for trajectory in trajectories if scoring_failed(trajectory)]
    scored = len(failures) + sum(not is_failed(trajectory) for trajectory in trajectories)
    if len(failures) <= allowed * scored:
        return
    commonest, count = Counter(failures).most_common(1)[0]
    raise TurnwiseError(
        f"{len(failures)} of {scored} trajectories could not be scored (scoring.max_failures={allowed:g}); "
        f"most often ({count}): {commonest}"
    )

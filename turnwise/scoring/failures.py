"""Failures of the machinery of scoring: how they are retried, counted, and when there are too many of them."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from turnwise.errors import ScoringFailed, TurnwiseError
from turnwise.scoring.scorer import SCORING, Score, Scorer, evaluate, is_failed, name_of, raised_by
from turnwise.types import Trajectory

LONGEST_WAIT = 10.0
LONGEST_ASKED_WAIT = 60.0
"""Of what a server may ask for with Retry-After."""

T = TypeVar("T")


class Lost(Exception):
    """One attempt failed for reasons that say nothing about the trajectory; `wait` is what a server asked for."""

    def __init__(self, problem: str, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.wait = wait


@dataclass(slots=True)
class Tally:
    """What a runner went through, in trajectories: `Tally(calls=64, attempts=66, retries=2, failures=0, seconds=3.3)`.

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

    def take(self) -> dict[str, float]:
        """The metrics since they were last taken; empty when nothing was scored."""
        counts = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        for field in fields(self):
            setattr(self, field.name, field.default)
        if not counts["calls"]:
            return {}
        rates = {
            "failure_rate": counts["failures"] / counts["calls"],
            "retry_rate": counts["retries"] / max(counts["attempts"], 1.0),
        }
        return {f"{SCORING}/{name}": value for name, value in (counts | rates).items()}


async def retrying(
    attempt: Callable[[], Awaitable[T]],
    retries: int,
    tally: Tally,
    *,
    scorer: str,
    first_wait: float = 0.0,
    count: int = 1,
) -> T:
    """What the attempt returns. After Lost it is tried again, waiting longer each time; in the end ScoringFailed.

    `count` trajectories hang on it. Whatever else the scorer raises is a failure too, and not tried again; only a
    TurnwiseError passes.
    """
    tally.calls += count
    for number in range(retries + 1):
        tally.attempts += count
        try:
            return await attempt()
        except ScoringFailed:  # the scorer has its own machinery, and has retried it in its own way
            tally.failures += count
            raise
        except TurnwiseError:
            raise
        except Lost as lost:
            if number == retries or lost.wait > LONGEST_ASKED_WAIT:
                tally.failures += count
                raise ScoringFailed(f"{lost} (attempt {number + 1} of {retries + 1})") from lost
            tally.retries += count
            # Jitter, so that calls that were cut off together do not come back together.
            pause = min(first_wait * 2**number, LONGEST_WAIT) * random.uniform(0.5, 1.5)
            await asyncio.sleep(max(pause, lost.wait))
        except (Exception, SystemExit) as error:
            tally.failures += count
            raise raised_by(scorer, error) from error
    raise ValueError(f"retries must not be negative: {retries}")


def counted(scorer: Scorer, tally: Tally) -> Scorer:
    """A scorer that runs where it is called, counted as the others are."""

    async def count(trajectory: Trajectory) -> Score:
        async def attempt() -> Score:
            with tally.timed():
                return await evaluate(scorer, trajectory)

        return await retrying(attempt, 0, tally, scorer=name_of(scorer))

    count.__qualname__ = name_of(scorer)
    return count


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

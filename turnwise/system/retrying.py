"""Trying again what may pass: the one retry of the system, with its policy, and what a server says about waiting."""

import asyncio
import datetime
import email.utils
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class AttemptFailed(Exception):
    """One attempt failed in a way that may pass; anything else an attempt raises is not tried again."""

    def __init__(self, problem: str, wait: float | None = None) -> None:
        super().__init__(problem)
        self.wait = wait
        """Seconds the server asked for."""
        self.at_once = False
        """Whether there is no need to wait: the next attempt goes elsewhere."""
        self.attempts = 1
        """How many were made, this one included."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and after which waits: `RetryPolicy(retries=3, first_wait=0.5)`."""

    retries: int
    first_wait: float
    """Seconds before the second attempt; doubled each time, with jitter."""
    longest_wait: float = 30.0
    longest_asked: float = 120.0
    """A server that asks for more is given up."""

    def pause(self, attempt: int, wait: float | None) -> float:
        """Seconds before the attempt after this one (from 0).

        Jitter, so that those who were cut off together do not come back together.
        """
        if wait is not None:
            return wait + random.uniform(0.0, self.first_wait)
        return min(self.first_wait * 2.0**attempt, self.longest_wait) * random.uniform(0.5, 1.5)


async def retrying(attempt: Callable[[], Awaitable[T]], policy: RetryPolicy) -> T:
    """What an attempt returns; the last AttemptFailed, with their number, when there is none left."""
    for number in itertools.count():
        try:
            return await attempt()
        except AttemptFailed as error:
            error.attempts = number + 1
            if number >= policy.retries or (not error.at_once and (error.wait or 0.0) > policy.longest_asked):
                raise
            if not error.at_once:
                await asyncio.sleep(policy.pause(number, error.wait))
    raise AssertionError("counting has no end")


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or a date; None when the server does not say."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value.strip()[:9])
    try:
        when = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds())

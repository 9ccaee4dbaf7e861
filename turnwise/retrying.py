"""When to ask a server again: when it says so, or else after longer and longer waits with some chance in them."""

import datetime
import email.utils
import random


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


def backoff(attempt: int, first: float, longest: float) -> float:
    """Seconds before the attempt after this one (from 0): doubled each time, and never the same for two clients."""
    return min(first * 2.0**attempt, longest) * random.uniform(0.5, 1.5)

"""Waiting before asking again: the server's word in both its forms, and doubling waits with some chance."""

import asyncio
import datetime
import email.utils

import pytest

from turnwise.system.retrying import AttemptFailed, RetryPolicy, retry_after, retrying


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("3", 3.0), (" 12 ", 12.0), ("soon", None), ("", None), ("9" * 40, 999999999.0)],
)
def test_numbers_and_nonsense(value, seconds):
    assert retry_after(value) == seconds


def test_a_date_is_seconds_from_now_and_never_negative():
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=90)
    assert 80 < retry_after(email.utils.format_datetime(later, usegmt=True)) <= 90
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def test_waits_double_up_to_the_longest_unless_the_server_says():
    policy = RetryPolicy(3, 0.5, 4.0)
    for attempt, middle in enumerate([0.5, 1.0, 2.0, 4.0, 4.0]):
        found = [policy.pause(attempt, None) for _ in range(50)]
        assert all(0.5 * middle <= wait <= 1.5 * middle for wait in found) and len(set(found)) > 1
    assert all(7.0 <= policy.pause(0, 7.0) <= 7.5 for _ in range(50))


def attempts(outcomes, **policy):
    """What comes of attempts that end so, and how many were left."""
    left = list(outcomes)

    async def attempt():
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    try:
        found = asyncio.run(retrying(attempt, RetryPolicy(**{"retries": 2, "first_wait": 0.0} | policy)))
    except AttemptFailed as error:
        found = (str(error), error.attempts)
    return found, len(left)


def test_only_what_may_pass_is_tried_again_and_not_for_ever():
    lost, absurd = AttemptFailed("lost"), AttemptFailed("come back tomorrow", 86400.0)
    assert attempts([lost, AttemptFailed("again", 0.0), 5, 6]) == (5, 1)
    assert attempts([lost, lost, AttemptFailed("last"), 6]) == (("last", 3), 1)
    assert attempts([absurd, 6]) == (("come back tomorrow", 1), 1)
    elsewhere = AttemptFailed("come back tomorrow", 86400.0)
    elsewhere.at_once = True
    assert attempts([elsewhere, 6]) == (6, 0)
    with pytest.raises(ZeroDivisionError):
        attempts([lost, ZeroDivisionError(), 6])

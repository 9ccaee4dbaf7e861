"""Waiting before asking again: the server's word in both its forms, and doubling waits with some chance."""

import datetime
import email.utils

import pytest

from turnwise.retrying import backoff, retry_after


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


def test_waits_double_up_to_the_longest():
    for attempt, middle in enumerate([0.5, 1.0, 2.0, 4.0, 4.0]):
        found = [backoff(attempt, 0.5, 4.0) for _ in range(50)]
        assert all(0.5 * middle <= wait <= 1.5 * middle for wait in found) and len(set(found)) > 1

"""How old trained tokens are, token by token."""

import numpy as np
import pytest

from turnwise.rollout.collector import age_of
from turnwise.training.staleness import MOST_AGES, measure
from turnwise.types import Ledger, Origin, Sample, StopReason, Trajectory, VersionRun


def versions(draw, spans, *numbers):
    made = draw(spans)
    made.versions = np.full(len(spans), -1, np.int32)
    made.versions[made.loss_mask] = numbers
    return made


def test_every_policy_token_counts_once_and_no_other(draw):
    found = measure([versions(draw, "ppaat", 5, 4), versions(draw, "paa", 2, 5)], 5)
    assert found == {
        "staleness/mean": 1.0, "staleness/max": 3.0, "staleness/min": 0.0,
        "staleness/age_0": 0.5, "staleness/age_1": 0.25, "staleness/age_2": 0.0, "staleness/age_3": 0.25,
    }  # fmt: skip


def test_the_ages_that_may_come_have_a_share_from_the_first_step_on(draw):
    found = measure([versions(draw, "pa", 0)], 0, 2)
    assert [found[f"staleness/age_{age}"] for age in range(3)] == [1.0, 0.0, 0.0] and len(found) == 6
    assert len(measure([versions(draw, "pa", 0)], 0)) == 3, "on-policy: nothing to tell apart"
    assert measure([], 3) == {}


def test_very_old_tokens_share_the_last_age(draw):
    found = measure([versions(draw, "paaa", 0, 80, 99)], 99)
    shares = {name: value for name, value in found.items() if "age_" in name}
    assert len(shares) == MOST_AGES + 1 and found["staleness/max"] == 99
    assert shares["staleness/age_16_up"] == pytest.approx(2 / 3) and sum(shares.values()) == pytest.approx(1)


def test_the_age_of_an_episode_is_that_of_its_oldest_token():
    ledger = Ledger()
    ledger.append([1, 2], Origin.PROMPT, 0)
    ledger.append([3, 4, 5], Origin.POLICY, 0, [-0.1] * 3, [VersionRun(7, 2), VersionRun(8, 1)])
    trajectory = Trajectory(Sample("s", (), "t"), 0, 0, [], [], [ledger, Ledger()], StopReason.ANSWERED, 0.0)
    assert age_of(trajectory, 8) == 1
    trajectory.segments = []
    assert age_of(trajectory, 8) == 0

"""The over-long penalty, dynamic sampling and the book of failed groups."""

import math

import pytest

from turnwise.errors import ConfigError, DataError, TurnwiseError
from turnwise.rollout.collector import keep_varied
from turnwise.training.reward_shaping import count, overlong_penalty, shape_overlong
from turnwise.training.sequences import LEFT_OUT
from turnwise.types import Group, Message, Role, Sample, StopReason, Trajectory

SAMPLE = Sample("s", (Message(Role.USER, "x"),), "d")


def group(*rewards: float | None) -> Group:
    """None stands for a failure."""
    siblings = []
    for number, reward in enumerate(rewards):
        failure = "the endpoint died" if reward is None else None
        made = Trajectory(SAMPLE, number, 0, [], [], [], StopReason.ANSWERED, 0.0, failure)
        made.reward = reward
        made.parts = {} if reward is None else {"accuracy": float(reward > 0.5)}
        siblings.append(made)
    return Group(SAMPLE, siblings)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (99, -1.9), (100, -2.0), (500, -2.0)]
)
def test_the_penalty_falls_linearly_in_the_buffer(tokens, expected):
    assert overlong_penalty(tokens, limit=100, buffer=20, factor=2.0) == pytest.approx(expected)


def test_length_is_everything_after_the_prompt_in_all_segments(draw):
    made = [
        draw("p" * 50 + "ata", trajectory=0, reward=1.0),
        draw("paa", trajectory=1, reward=1.0),
        draw("ppppau", trajectory=1, reward=1.0),
        draw("paaaaaa", trajectory=2, reward=math.nan, group=LEFT_OUT),
    ]
    metrics = shape_overlong(made, limit=5, buffer=2)
    assert [s.reward for s in made[:3]] == [1.0, 0.5, 0.5] and math.isnan(made[3].reward)
    assert metrics == {"overlong/penalty_mean": -0.25, "overlong/fraction": 0.5}


def test_the_penalty_refuses_what_cannot_work():
    for buffer in (0, 11):
        with pytest.raises(ConfigError, match="buffer must lie between 1 and the limit of 10"):
            overlong_penalty(1, limit=10, buffer=buffer)
    with pytest.raises(ConfigError, match="factor cannot be negative"):
        overlong_penalty(1, limit=10, buffer=5, factor=-1)


def test_groups_without_variance_are_dropped():
    varied, flat, failed, survivor = group(1.0, 0.0, None), group(1.0, 1.0), group(None, None), group(1.0, None)
    late = group(0.2, 0.3)
    found = keep_varied([varied, flat, failed, survivor, late])
    assert found.kept == [varied, late] and found.dropped == [flat, failed, survivor]
    assert keep_varied([late], part="accuracy").dropped == [late]
    assert keep_varied([varied], part="accuracy").kept == [varied]
    with pytest.raises(DataError, match="no reward part 'acc'; it has: accuracy"):
        keep_varied([late], part="acc")


def test_failures_are_booked():
    book = count([group(1.0, 0.0, None), group(1.0, 1.0), group(None, None), group(1.0, None), group(0.0, 0.0, None)])
    assert (book.groups, book.trajectories, book.failed) == (5, 12, 5)
    assert (book.all_failed, book.single, book.flat) == (1, 1, 2)
    assert book.metrics() == {
        "groups/total": 5, "groups/all_failed": 1, "groups/single": 1, "groups/flat": 2,
        "trajectories/total": 12, "trajectories/failed": 5,
    }  # fmt: skip
    book.stop_if_failing(5 / 12)
    with pytest.raises(
        TurnwiseError, match=r"5 of 12 episodes failed \(rollout.max_failures=0.4\); most often \(5\): the"
    ):
        book.stop_if_failing(0.4)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        book.stop_if_failing(1.5)


def test_an_episode_that_could_not_be_scored_has_a_limit_of_its_own():
    made = group(None, None, 1.0)
    for trajectory in made.trajectories[:2]:
        trajectory.failure = "scoring: nobody there"
    book = count([made])
    book.stop_if_failing(0.0)
    assert book.metrics()["trajectories/failed"] == 2, "counted, and judged by scoring.max_failures"


def test_a_trajectory_without_reward_or_failure_is_an_error():
    made = group(1.0, 0.0)
    made.trajectories[1].reward = None
    for read in (count, keep_varied):
        with pytest.raises(DataError, match="sample s, sibling 1 has not been scored"):
            read([made])

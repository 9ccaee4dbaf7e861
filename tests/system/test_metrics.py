"""Metrics carry their reduction, shares their error."""

import math
import random
import statistics

import pytest

from turnwise.system.metrics import Metric, Reduction, reduce, share


def test_each_name_is_reduced_its_own_way() -> None:
    metrics = [
        Metric("mean", 1), Metric("mean", 3),
        Metric("sum", 1, Reduction.SUM), Metric("sum", 3, Reduction.SUM),
        Metric("max", 1, Reduction.MAX), Metric("max", 3, Reduction.MAX),
        Metric("min", 1, Reduction.MIN), Metric("min", 3, Reduction.MIN),
    ]  # fmt: skip
    assert reduce(metrics) == {"mean": 2.0, "sum": 4.0, "max": 3.0, "min": 1.0}
    assert reduce([]) == {}


def test_one_name_with_two_reductions_is_a_bug() -> None:
    with pytest.raises(ValueError, match="reduced by mean and by sum"):
        reduce([Metric("x", 1), Metric("x", 1, Reduction.SUM)])


def test_the_error_of_a_share_is_that_of_a_bootstrap_over_samples() -> None:
    """Groups of four whose episodes mostly agree: n episodes are worth far fewer."""
    draw = random.Random(3)
    rates = [draw.choice((0.05, 0.3, 0.95)) for _ in range(120)]
    groups = [[draw.random() < rate for _ in range(4)] for rate in rates]
    found = share((number, right) for number, group in enumerate(groups) for right in group)
    assert found is not None and (found.n, found.samples) == (480, 120)
    means = [statistics.fmean(x for group in draw.choices(groups, k=120) for x in group) for _ in range(2000)]
    naive = math.sqrt(found.value * (1 - found.value) / found.n)
    assert found.stderr == pytest.approx(statistics.stdev(means), rel=0.08)
    assert found.stderr > 1.4 * naive, "clusters count"


def test_chances_read_from_several_episodes_have_the_error_of_those_episodes() -> None:
    draw = random.Random(5)
    groups = [[draw.random() < 0.5 for _ in range(4)] for _ in range(90)]
    by_episode = share((number, right) for number, group in enumerate(groups) for right in group)
    chances = [(number, statistics.fmean(group)) for number, group in enumerate(groups)]
    by_chance = share(chances, episodes_behind=360)
    alone = share(chances)
    assert by_episode is not None and by_chance is not None and alone is not None
    assert by_chance.stderr == pytest.approx(by_episode.stderr) and by_chance.n == 90
    assert by_chance.stderr < 0.7 * alone.stderr, "90 episodes would know less"


def test_the_error_of_a_share_is_the_plain_one_for_single_episodes_and_never_zero() -> None:
    alone = share(enumerate([True] * 53 + [False] * 75))
    assert str(alone) == "41.4% ± 4.4 (n=128)"
    for right in (False, True):
        none = share((number, right) for number in range(8))
        assert none is not None and none.stderr == pytest.approx(1 / 18), "Wilson at z = 1: 1 / (2 (n + 1))"
    same = share((number // 4, False) for number in range(8))
    assert same is not None and same.stderr == pytest.approx(1 / 6), "eight episodes of two samples are worth two"
    assert str(same) == "0.0% ± 16.7 (n=8, 2 samples)"
    halves = share((number // 2, number % 2 == 0) for number in range(20))
    assert halves is not None and 0.05 < halves.stderr < 0.2, "at most worth its episodes, however even the groups are"
    single = share(("a", number < 3) for number in range(6))
    assert single is not None and single.stderr > 0.3, "one sample says nothing of others"
    assert share([]) is None

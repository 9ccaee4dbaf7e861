"""Metrics carry their reduction."""

import pytest

from turnwise.metrics import Metric, Reduction, reduce


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

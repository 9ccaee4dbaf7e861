"""Steps are grouped, thinned and compared without losing any."""

import numpy as np
import pytest

from turnwise.ext.board.series import Series
from turnwise.ext.board.steps import MOST_POINTS, Buckets, Curve, Rows, Windows, jsonable
from turnwise.ext.board.table import Table
from turnwise.storage.index import record
from turnwise.storage.run_dir import METRICS


@pytest.mark.parametrize("count", [0, 1, 7, MOST_POINTS, MOST_POINTS + 1, 3 * MOST_POINTS - 1, 2000])
def test_buckets_hold_every_step_once_and_equally_many(count):
    steps = np.arange(count, dtype=np.int64) * 3 + 10
    buckets = Buckets.over(steps)
    assert len(buckets) <= MOST_POINTS and len(buckets.of_step) == count
    sizes = np.bincount(buckets.of_step, minlength=len(buckets))
    assert sizes.sum() == count and (sizes[1:] == buckets.size).all(), "only the first may hold fewer"
    assert set(buckets.steps) <= set(steps.tolist()) and buckets.steps == sorted(buckets.steps)
    if count <= MOST_POINTS:
        assert buckets.steps == steps.tolist()


def test_rows_of_a_split_know_their_step(run_dir, make):
    record(run_dir, "trajectories/step_000003.parquet", [make("a", step=3), make("b", step=3)])
    record(run_dir, "trajectories/step_000005.parquet", [make("d", step=5)])
    record(run_dir, "eval/step_000004.parquet", [make("e", step=-1)])
    table = Table(run_dir)
    table.refresh(None)
    rows = Rows.of(table, "train")
    assert rows.steps.tolist() == [3, 5] and rows.steps[rows.at].tolist() == [3, 3, 5]
    means = rows.means(np.array([1.0, 2.0, np.nan]))
    assert means[0] == 1.5 and np.isnan(means[1])
    assert Rows.of(table, "eval").steps.tolist() == [4] and len(Rows.of(table, "greedy")) == 0


def test_a_step_written_twice_counts_as_it_was_written_last(run_dir):
    for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (3, None)):
        run_dir.append_jsonl(METRICS, {"step": step, "loss": value})
    series = Series(run_dir)
    series.refresh()
    curve = Curve.of(series, "loss")
    assert curve.steps.tolist() == [1, 2, 3] and curve.values[:2].tolist() == [0.1, 0.25]
    assert curve.finite().steps.tolist() == [1, 2]


def test_windows_never_grow_beyond_what_shows_when_something_began():
    assert [Windows.over(steps).length for steps in (8, 20, 50, 2000)] == [4, 4, 10, 100]


def test_numbers_for_a_chart_are_short_and_finite():
    values = np.array([0.1 + 0.2, 1 / 3, -123456.789, 1e-12, 0.0, np.nan, np.inf, -2.5e30])
    assert jsonable(values) == [0.3, 0.333333, -123457.0, 1e-12, 0.0, None, None, -2.5e30]

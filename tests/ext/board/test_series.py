"""Curves are read as the file grows, and thinned without losing their range."""

import json
import math

import pytest

from turnwise.ext.board.series import Points, Series, thin
from turnwise.storage.run_dir import RunDir


def a_run(tmp_path, lines):
    run = RunDir.create(tmp_path, "a", "train")
    for line in lines:
        run.append_jsonl("metrics.jsonl", line)
    return run


def line(step, **values):
    return {"step": step, "seconds": 2.0 * step, "tokens": 100 * step, **values}


def test_each_metric_has_the_points_of_the_lines_that_name_it(tmp_path):
    run = a_run(tmp_path, [line(0, **{"val/accuracy": 0.1}), line(1, loss=3.0), line(2, loss=2.0)])
    series = Series(run)
    assert series.refresh()
    assert series.names() == ["loss", "val/accuracy"]
    assert series.get("loss") == Points([1, 2], [2.0, 4.0], [100.0, 200.0], [3.0, 2.0])
    assert series.get("val/accuracy") == Points([0], [0.0], [0.0], [0.1])
    assert series.get("no such metric") == Points([], [], [], [])


def test_only_new_whole_lines_are_taken_in(tmp_path):
    run = a_run(tmp_path, [line(1, loss=3.0)])
    series = Series(run)
    assert series.refresh() and not series.refresh()
    text = json.dumps(line(2, loss=2.0))
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(text[:20])
    assert not series.refresh()
    assert series.get("loss").step == [1]
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(text[20:] + "\n")
    assert series.refresh()
    assert series.get("loss").step == [1, 2]


def test_a_file_that_a_resume_wrote_anew_is_read_again(tmp_path):
    run = a_run(tmp_path, [line(step, loss=float(step)) for step in range(1, 6)])
    series = Series(run)
    series.refresh()
    run.write_text("metrics.jsonl", "".join(json.dumps(line(step, other=1.0, pad="x" * 90)) + "\n" for step in (1, 2)))
    assert series.refresh()
    assert series.names() == ["other"]
    (run.path / "metrics.jsonl").write_text(json.dumps(line(9, short=1.0)) + "\n")  # the same file, cut
    assert series.refresh()
    assert series.get("short").step == [9]
    (run.path / "metrics.jsonl").unlink()
    assert series.refresh() and series.names() == [] and not series.refresh()


def test_damaged_lines_are_named_and_the_others_kept(tmp_path):
    run = a_run(tmp_path, [line(1, loss=1.0)])
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo\n[1, 2]\n{"loss": 2.0}\n{"step": "three", "loss": 1.0}\n')
    run.append_jsonl("metrics.jsonl", line(6, loss=0.5))
    series = Series(run)
    series.refresh()
    assert series.get("loss").step == [1, 6]
    assert [f"line {number}" in text for number, text in enumerate(series.problems(), start=2)] == [True] * 4


def test_what_is_no_finite_number_is_nan_inside_and_null_outside(tmp_path):
    run = a_run(tmp_path, [])
    (run.path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": NaN}\n{"step": 2, "seconds": Infinity, "tokens": 5, "loss": 1' + "0" * 400 + "}\n"
        '{"step": 3, "loss": null, "note": "text is no metric"}\n{"step": 4, "loss": 0.5, "flag": true}\n'
    )
    series = Series(run)
    series.refresh()
    assert [math.isnan(value) for value in series.get("loss").value] == [True, True, True, False]
    thinned = series.thinned("loss", 10)
    assert thinned["value"] == [None, None, None, 0.5]
    assert thinned["seconds"] == [None] * 4 and thinned["tokens"] == [None, 5.0, None, None]
    assert series.names() == ["flag", "loss"]
    json.dumps(thinned, allow_nan=False)


def test_thinning_averages_neighbours_and_keeps_their_range():
    points = Points(
        list(range(100)), [float(one) for one in range(100)], [0.0] * 100, [float(one) for one in range(100)]
    )
    thinned = thin(points, 10)
    assert thinned["value"] == [4.5 + 10 * one for one in range(10)]
    assert thinned["low"] == [10.0 * one for one in range(10)]
    assert thinned["high"] == [9.0 + 10 * one for one in range(10)]
    assert thinned["step"] == [4 + 10 * one for one in range(10)]
    assert set(thin(points, 100)) == {"step", "seconds", "tokens", "value"}


@pytest.mark.parametrize("size, points", [(11, 10), (19, 10), (601, 600), (5000, 7)])
def test_every_value_lands_in_one_bucket(size, points):
    values = [float(one * one) for one in range(size)]
    thinned = thin(Points(list(range(size)), values, values, values), points)
    assert len(thinned["value"]) == points
    assert thinned["low"][0] == values[0] and thinned["high"][-1] == values[-1]
    assert all(
        low <= value <= high for low, value, high in zip(thinned["low"], thinned["value"], thinned["high"], strict=True)
    )


def test_a_bucket_without_a_finite_value_is_null():
    nan = math.nan
    thinned = thin(Points([1, 2, 3, 4], [nan] * 4, [nan] * 4, [nan, nan, 1.0, 3.0]), 2)
    assert thinned["value"] == [None, 2.0] and thinned["low"] == [None, 1.0] and thinned["high"] == [None, 3.0]


def test_a_metric_is_constant_until_it_once_was_not(tmp_path):
    run = a_run(tmp_path, [line(1, lr=0.5, loss=3.0, odd=None), line(2, lr=0.5, loss=2.0, odd=None, late=1)])
    series = Series(run)
    series.refresh()
    assert series.constants() == {"lr": 0.5}, "one value is not yet constant, and what is not finite never is"
    run.append_jsonl("metrics.jsonl", line(3, lr=0.25, loss=2.0, late=1))
    series.refresh()
    assert series.constants() == {"late": 1.0}

"""The headline of a run: from the first to the last evaluation, the last step's extremes, what to watch, its warnings."""

import time

from turnwise.ext.board.headline import headline
from turnwise.ext.board.run_summary import RunSummary, summarise_run
from turnwise.ext.board.run_warnings import run_warnings
from turnwise.ext.board.runs import Runs
from turnwise.ext.board.series import Series
from turnwise.ext.board.table import Table
from turnwise.storage.index import record
from turnwise.storage.run_dir import WARNINGS


def made_of(run):
    series, table = Series(run), Table(run)
    series.refresh()
    table.refresh(None)
    return headline(series, table.snapshot, summarise_run(run), None)


def a_line(step, **values):
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"step": step, "seconds": 10.0 * step, "tokens": 1000 * step} | named


def test_a_training_goes_from_its_first_evaluation_to_its_last(run_dir, make):
    assert made_of(run_dir) == {
        "measures": [],
        "cost": {"seconds": None, "tokens": None, "tokens_per_second": None, "learned": False},
        "episodes": None,
    }
    run_dir.append_jsonl("metrics.jsonl", a_line(1, critic__score__mean=0.25))
    record(run_dir, "trajectories/step_000001.parquet", [make("first", step=1, reward=9.0)])
    (only,) = made_of(run_dir)["measures"]
    assert (only["name"], only["first"], only["last"], only["steps"]) == ("reward", None, 0.25, [1, 1])
    both = {"val__accuracy_stderr": 0.1, "val__greedy_accuracy": 0.5}
    run_dir.append_jsonl("metrics.jsonl", a_line(1, val__accuracy=0.25, **both))
    run_dir.append_jsonl("metrics.jsonl", a_line(2, critic__score__mean=0.5))
    run_dir.append_jsonl("metrics.jsonl", a_line(4, val__accuracy=0.75, val__accuracy_stderr=0.05))
    rows = [make("s0", step=2, sibling=number, reward=reward) for number, reward in enumerate((0.5, 1.0, None, -1.0))]
    record(run_dir, "trajectories/step_000002.parquet", rows)
    record(run_dir, "eval/step_000004.parquet", [make("e0", step=4, reward=5.0)])
    found = made_of(run_dir)
    accuracy, greedy = found["measures"]
    wanted = {"first": 0.25, "first_error": 0.1, "last": 0.75, "last_error": 0.05, "steps": [1, 4], "share": True}
    assert {name: accuracy[name] for name in wanted} == wanted
    assert (greedy["name"], greedy["first"], greedy["last"]) == ("greedy accuracy", None, 0.5)
    assert found["cost"] == {"seconds": 40.0, "tokens": 4000.0, "tokens_per_second": 100.0, "learned": False}
    episodes = found["episodes"]
    assert (episodes["split"], episodes["step"], episodes["count"]) == ("train", 2, 3)
    assert [episodes[one]["row"] for one in ("best", "worst")] == [1, 3] and episodes["best"]["reward"] == 1.0


def test_equal_rewards_have_no_worst_and_a_fine_tuning_has_losses(run_dir, make):
    record(run_dir, "trajectories/step_000000.parquet", [make("s0", step=0, sibling=number) for number in range(2)])
    assert made_of(run_dir)["episodes"]["worst"] is None
    for step, loss in ((1, 0.5), (2, 0.25)):
        run_dir.append_jsonl("metrics.jsonl", a_line(step, sft__loss=loss, sft__heldout_loss=2 * loss))
    found = made_of(run_dir)
    assert [(one["name"], one["first"], one["last"]) for one in found["measures"]] == [
        ("loss", 0.5, 0.25),
        ("loss of held-out conversations", 1.0, 0.5),
    ]
    assert found["cost"]["learned"] is True and found["episodes"] is None, "they are what it learned from"
    summary = Runs([run_dir.path]).open("first").summary(time.time())
    assert (summary["loss"], summary["spark"], summary["reward"]) == (0.25, [0.5, 0.25], None)


def test_an_evaluation_without_metrics_has_the_accuracy_of_its_report(run_dir):
    newest = RunSummary(accuracy=0.5, accuracy_error=0.1)
    (only,) = headline(Series(run_dir), Table(run_dir).snapshot, newest, 90.0)["measures"]
    assert (only["first"], only["last"], only["last_error"], only["steps"]) == (None, 0.5, 0.1, None)


def test_a_runs_own_warnings_are_told_each_kind_once(run_dir):
    assert run_warnings(run_dir) == []
    for step, text in ((3, "no signal for 3 steps: x"), (4, "gap of 0.12"), (10, "no signal for 10 steps: x")):
        run_dir.append_jsonl(WARNINGS, {"step": step, "text": text})
    found = [(one.text, one.count, one.first_step, one.last_step) for one in run_warnings(run_dir)]
    assert found == [("no signal for 10 steps: x", 2, 3, 10), ("gap of 0.12", 1, 4, 4)]
    run_dir.write_text(WARNINGS, '{"step": 1}\n[]\n{"step": 1e400, "text": "x"}\n{"step": 1, "text": "\\ud800"}\n')
    texts = [one.text for one in run_warnings(run_dir)]
    assert len(texts) == 4 and sum("cannot be read" in text for text in texts) == 3
    run_dir.write_json("eval/step_000000.json", {"warnings": ["the tool failed", 3], "sources": {}})
    assert run_warnings(run_dir)[0].text == "the tool failed"


def test_what_there_is_to_watch_is_counted_and_remembered(run_dir, make):
    record(run_dir, "trajectories/step_000001.parquet", [make("s0", step=1)])
    run = Runs([run_dir.path]).open("first")
    assert run.summary(time.time())["watch"] is None, "nothing was read for the list"
    assert run.watched() == {"alarm": 0, "watch": 0, "pending": 0}
    run.forget_table()
    assert run.summary(time.time())["watch"] == run.watched() and not run.has_table
    run_dir.append_jsonl(WARNINGS, {"step": 1, "text": "no signal"})
    assert run.known_watched() is None and run.watched()["watch"] == 1
    assert run.details(time.time())["warnings"][0]["text"] == "no signal"

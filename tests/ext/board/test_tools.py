"""Tools by step, the funnel, flips, stop reasons and failures are counted as they happened."""

import json

import pytest

from turnwise.ext.board import steps as by_step
from turnwise.ext.board.table import Table, listing
from turnwise.ext.board.tools import MOST_FAILURES, STAGES, tools
from turnwise.storage.index import record
from turnwise.types import CallStatus, StopReason

LOST = "the sandbox could not be reached"


def opened(run_dir) -> Table:
    table = Table(run_dir)
    table.refresh(None)
    return table


@pytest.fixture
def table(run_dir, make, call):
    broken = [call(0, "1/0", CallStatus.ERROR), call(1, "print(1)", CallStatus.TIMEOUT)]
    used = {"reply": "the result is 1764", "answer": "So it is 1764."}
    record(
        run_dir,
        "trajectories/step_000001.parquet",
        [
            make("a", step=1, **used),
            make("b", step=1, reward=0.0, **used),
            make("c", step=1, calls=broken, reward=0.0),
            make("d", step=1, calls=[]),
            make("e", step=1, source="math", calls=[], reward=0.0, stop=StopReason.TURN_TRUNCATED),
        ],
    )
    failed = make("g", step=2, reward=None, failure=LOST, stop=StopReason.FAILED)
    record(run_dir, "trajectories/step_000002.parquet", [make("f", step=2, calls=[]), failed])
    flips = [(True, 1.0), (True, 0.0), (False, 1.0), (False, 1.0), (None, 1.0), (False, 0.0)]
    judged = [
        make(f"v{row}", step=-1, first_right=first, reward=reward, parts={"acc": reward})
        for row, (first, reward) in enumerate(flips)
    ]
    judged.append(make("lost", step=-1, reward=None, failure=LOST, stop=StopReason.FAILED))
    record(run_dir, "eval/step_000002.parquet", judged)
    record(run_dir, "eval/greedy_step_000002.parquet", [make("v0", step=-1, first_right=False)])
    return opened(run_dir)


def test_calls_are_counted_by_tool_step_and_status(table):
    python = tools(table)["tools"]["python"]
    assert python["step"] == [1, 2]
    assert python["calls"] == [4, 1] and python["failed"] == [2, 0]
    assert python["statuses"] == {"ok": [2, 1], "error": [1, 0], "timeout": [1, 0]}
    assert python["p50"] == [0.25, 0.25] and python["p90"] == [1.25, 0.25]


def test_a_step_without_a_call_has_no_latency(run_dir, make):
    record(run_dir, "trajectories/step_000001.parquet", [make(step=1)])
    record(run_dir, "trajectories/step_000002.parquet", [make(step=2, calls=[])])
    python = tools(opened(run_dir))["tools"]["python"]
    assert python["calls"] == [1, 0] and python["p50"] == [0.25, None]


def test_the_funnel_narrows_and_leaves_out_what_failed_for_want_of_infrastructure(table):
    found = tools(table)
    assert found["funnel"]["split"] == "train"
    arithmetic = found["funnel"]["sources"]["arithmetic"]
    assert arithmetic == {"episodes": 5, "called": 3, "ran": 2, "evidence": 2, "used": 2, "correct": 1}
    assert found["funnel"]["sources"]["math"] == {"episodes": 1} | dict.fromkeys(STAGES, 0)
    steps = found["funnel_steps"]
    assert steps["arithmetic"]["step"] == [1, 2] and steps["math"]["step"] == [1]
    assert steps["arithmetic"]["called"] == [0.75, 0.0] and steps["arithmetic"]["correct"] == [0.25, 0.0]


def test_flips_are_of_evaluations_that_know_the_first_answer(table):
    assert tools(table)["flips"] == {"step": [2], "wrong_to_right": [2], "right_to_wrong": [1], "episodes": [5]}


def test_stop_reasons_add_up_to_the_episodes(table):
    stops = tools(table)["stop_reasons"]
    assert stops == {"step": [1, 2], "reasons": {"answered": [4, 1], "turn_truncated": [1, 0], "failed": [0, 1]}}


def test_failures_are_listed_by_a_filter_that_finds_them(table):
    (failure,) = tools(table)["failures"]
    assert (failure["text"], failure["count"], failure["first_step"], failure["last_step"]) == (LOST, 2, 2, 2)
    assert listing(table, filter=failure["filter"])["matched"] == 2


@pytest.mark.parametrize(
    "text", ['it\'s "broken"\n\tat line 3', "\u00e4\u2028\U0001f600", "\\", "x" * 5000, "\x00", "'; drop"]
)
def test_whatever_a_failure_says_its_filter_finds_it_alone(run_dir, make, text):
    texts = [text, text, "another"]
    record(run_dir, "trajectories/step_000001.parquet", [make(f"s{row}", failure=one) for row, one in enumerate(texts)])
    table = opened(run_dir)
    first = tools(table)["failures"][0]
    assert first["count"] == 2 and listing(table, filter=first["filter"])["matched"] == 2


def test_long_failures_that_begin_alike_are_one_kind(run_dir, make):
    texts = ["Traceback " * 100 + str(row) for row in range(MOST_FAILURES + 5)] + ["Traceback " * 30]
    record(run_dir, "trajectories/step_000001.parquet", [make(f"s{row}", failure=one) for row, one in enumerate(texts)])
    table = opened(run_dir)
    found = tools(table)["failures"]
    assert [kind["count"] for kind in found] == [MOST_FAILURES + 5, 1]
    assert [listing(table, filter=kind["filter"])["matched"] for kind in found] == [MOST_FAILURES + 5, 1]


def test_a_long_run_is_thinned_and_no_call_is_lost(run_dir, make, monkeypatch):
    monkeypatch.setattr(by_step, "MOST_POINTS", 3)
    for step in range(8):
        record(
            run_dir, f"trajectories/step_{step:06d}.parquet", [make(f"s{row}", step=step) for row in range(step + 1)]
        )
    found = tools(opened(run_dir))
    python = found["tools"]["python"]
    assert found["bucket"] == 3 and len(python["step"]) == 3
    assert python["calls"] == [1 + 2, 3 + 4 + 5, 6 + 7 + 8] == found["stop_reasons"]["reasons"]["answered"]
    assert found["funnel_steps"]["arithmetic"]["called"] == [1.0, 1.0, 1.0]


def test_an_evaluation_without_training_shows_its_own_funnel(run_dir, make):
    record(run_dir, "eval/step_000000.parquet", [make(step=-1)])
    found = tools(opened(run_dir))
    assert found["funnel"]["split"] == "eval" and found["tools"]["python"]["calls"] == [1]


def test_an_empty_run_has_empty_lists_and_all_is_plain_json(run_dir, table):
    json.dumps(tools(table), allow_nan=False)
    empty = tools(Table(run_dir))
    assert empty["tools"] == {} and empty["failures"] == [] and empty["funnel"]["sources"] == {}
    assert empty["stop_reasons"] == {"step": [], "reasons": {}} and empty["flips"]["step"] == []

"""The board's result table is the command line's, and two evaluations are compared answer by answer."""

import time

import pytest

from turnwise.ext.board.results import paired, results
from turnwise.ext.board.runs import Runs
from turnwise.ext.board.table import Table
from turnwise.reports.evaluation import EpisodeResult, EvalReport, summarise
from turnwise.storage.index import record
from turnwise.storage.run_dir import RunDir

SAMPLES, SIBLINGS = 10, 2


@pytest.fixture
def evaluated(tmp_path, make):
    """Writes an evaluation as `turnwise eval` does: its right samples, by number, in two tries each."""

    def write(name: str, right: set[int], skip: int = -1) -> tuple[RunDir, EvalReport]:
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        run = RunDir(path)
        run.write_text("config.yaml", "task: arithmetic\n")
        made = [
            make(f"s{number}", step=0, sibling=sibling, reward=float(number in right), answer=f"{name} says {number}")
            for number in range(SAMPLES)
            for sibling in range(SIBLINGS)
            if number != skip
        ]
        record(run, "eval/step_000000.parquet", made)
        graded = [EpisodeResult(one, one.right, one.right) for one in made]
        report = EvalReport(path, 2.0, 100.0, {"arithmetic": summarise("arithmetic", graded)}, made)
        run.write_json("eval/step_000000.json", report.as_json())
        return run, report

    return write


def opened(run: RunDir):
    table = Table(run)
    table.refresh(None)
    return table.snapshot


def test_the_table_is_the_one_that_was_printed(evaluated):
    run, report = evaluated("a", {0, 1, 2})
    found = results(run)
    assert found is not None and found["sources"] == ["arithmetic"] and found["seconds"] == 2.0
    printed = [str(label) for label in report.table().columns[0].cells]
    assert [row["label"] for row in found["rows"]] == printed
    accuracy = next(row for row in found["rows"] if row["label"] == "accuracy, final answer")
    assert accuracy["values"] == [0.3]
    assert (found["n"], found["samples"], found["warnings"]) == ([20], [10], report.warnings)
    assert accuracy["errors"] == [report.sources["arithmetic"].accuracy_stderr] and accuracy["errors"][0] > 0.1


def test_ledgers_with_the_same_text_in_other_tokens_are_told_as_the_command_tells_them(evaluated):
    run, report = evaluated("a", {0})
    sources = report.as_json()["sources"]
    sources["arithmetic"] |= {"render_exact": 0.9, "render_same_text": 0.1}
    run.write_json("eval/step_000000.json", {"sources": sources})
    row = next(row for row in results(run)["rows"] if row["label"] == "ledger equals full render")
    assert row["values"] == ["18 of 20, 2 more in text"] and row["kind"] == "text"


def test_a_training_and_a_foreign_report_have_no_table(evaluated):
    run, _ = evaluated("a", {0})
    for text in ('{"accuracy": 0.5}', "[]", "{", '{"sources": 3}'):
        (run.path / "eval/step_000000.json").write_text(text)
        assert results(run) is None
    (run.path / "eval/step_000000.json").write_text('{"sources": {"x": {"accuracy": "much", "task": 3}, "y": 4}}')
    found = results(run)
    assert found is not None and found["sources"] == ["x"] and found["rows"][3]["values"] == [None]
    (run.path / "eval/step_000000.json").unlink()
    assert results(run) is None


def test_answers_are_paired_and_flips_lead_to_both_trajectories(evaluated):
    first, _ = evaluated("a", {0, 1, 2})
    second, _ = evaluated("b", {1, 2, 3, 4}, skip=9)
    found = paired(opened(first), opened(second))
    (source,) = found["sources"]
    assert (source["pairs"], source["to_right"], source["to_wrong"]) == (18, 4, 2)
    assert source["difference"] == pytest.approx(1 / 9) and source["second"] == pytest.approx(4 / 9)
    assert source["error"] == pytest.approx((((1 + 1 + 1) / 9 - (1 / 9) ** 2) / 9) ** 0.5)
    assert found["alone"] == [2, 0]
    flips = {(flip["sample"], flip["sibling"]): flip for flip in found["flips"]}
    assert set(flips) == {(sample, sibling) for sample in ("s0", "s3", "s4") for sibling in (0, 1)}
    lost = flips["s0", 1]
    assert not lost["right_now"] and lost["first"] == {"shard": "eval/step_000000", "row": 1, "answer": "a says 0"}
    assert lost["second"]["answer"] == "b says 0" and flips["s3", 0]["right_now"]
    assert paired(opened(first), opened(RunDir(first.path.parent)))["sources"] == []


def test_a_run_s_own_page_has_the_table(evaluated):
    run, _ = evaluated("a", {0})
    about = Runs([run.path.parent]).open("a").details(time.time())
    assert about["results"]["rows"][0] == {"label": "episodes", "kind": "count", "values": [20.0], "errors": [None]}

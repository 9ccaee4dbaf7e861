"""The table of an evaluation is readable at any width: columns for few data sources, rows for many."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from turnwise.reports.data_sources import SourceReport
from turnwise.reports.evaluation import EvalReport

KINDS = ("compare", "compute", "contrast", "count", "none", "prior", "read", "rotate", "search")


def source(name: str, failed: int = 0, flipped: int = 0, **task: float) -> SourceReport:
    counts = {"tool_calls": 9, "calls_by_status": {"ok": 9}, "tools": {}, "stop_reasons": {"answered": 12}}
    numbers = {"reward": 1.0, "num_turns": 1.86, "episodes_with_valid_call": 0.71, "user_turns": 0.0}
    tokens = {"policy_tokens": 88, "prompt_tokens": 40.0, "render_exact": 1.0}
    return SourceReport(
        name, 12, failed, 12 - failed, 12, 0.143, 0.142, 0.2, 0.1, flipped, 0, **counts, **numbers, **tokens, task=task
    )  # type: ignore[arg-type]


def printed(width: int, *sources: SourceReport) -> list[str]:
    out = io.StringIO()
    report = EvalReport(Path("runs/a"), 2.0, 44.0, {one.data_source: one for one in sources}, [])
    Console(file=out, width=width).print(report, highlight=False, soft_wrap=True)
    return out.getvalue().splitlines()


def cells(lines: list[str], first: str) -> list[str]:
    (found,) = [line for line in lines if line.split()[:1] == [first]]
    return found.replace(" ± ", "±").split()


def test_many_sources_are_rows_with_what_the_task_measures() -> None:
    measures = {"episodes": 12, "looks": 0.857, "evidence": 0.286, "faithful": 0.0}
    lines = printed(80, *(source(f"tinylook/{kind}", **measures, needless=0.5) for kind in KINDS))
    assert max(map(len, lines)) <= 80
    assert cells(lines, "tinylook/")[1:] == ["n", "accuracy", "turns", "tools", *list(measures)[1:], "needless"]
    for kind in KINDS:
        assert cells(lines, kind)[1:] == ["12", "14.3%±14.2", "1.86", "71%", "0.857", "0.286", "0", "0.5"]
    assert any("all other numbers: eval/step_000000.json" in line for line in lines)


def test_few_sources_are_columns_with_everything() -> None:
    for width, names in ((80, ("gsm8k",)), (80, ("gsm8k", "math")), (200, KINDS[:6]), (80, ("a/very/long/name" * 5,))):
        lines = printed(width, *map(source, names))
        assert any("ledger equals full render" in line for line in lines), names
    assert not any("ledger equals" in line for line in printed(80, *map(source, KINDS[:3])))


def test_measures_that_do_not_fit_are_named() -> None:
    measures = {f"measure_{number}": float(number) for number in range(9)}
    lines = printed(80, *(source(kind, **measures) for kind in KINDS))
    assert "measure_1" in lines[1] and "measure_8" not in lines[1]
    assert any("measure_8 and all else: eval/step_000000.json" in line for line in lines)


def test_failures_first_answers_and_names_of_our_own_columns() -> None:
    lines = printed(90, *(source(f"a/{kind}", failed=2, flipped=1, turns=7) for kind in KINDS))
    assert lines[1].split(maxsplit=6)[1:] == ["n", "failed", "first", "accuracy", "turns", "tools  task: turns"]
    assert cells(lines, "none")[1:] == ["10", "2", "20.0%", "14.3%±14.2", "1.86", "71%", "7"]


@pytest.mark.parametrize("width", [40, 50, 80])
def test_names_are_folded_and_shown_as_text(width: int) -> None:
    evil = "[red]" + "x" * 60 + "\x1b[2J"
    lines = printed(width, source(evil), source("short"), source("also/short"))
    assert any(line.startswith("[red]") for line in lines) and "\x1b" not in "".join(lines)
    assert cells(lines, "short")[1] == "12"


def test_tokens_that_were_cut_otherwise_are_no_other_text() -> None:
    lines = printed(100, replace(source("gsm8k"), render_exact=10 / 12, render_same_text=2 / 12))
    assert any("10 of 12, 2 more in text" in line for line in lines)

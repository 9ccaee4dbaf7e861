"""The linter: each kind of finding, counted in full and shown up to a limit."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from turnwise.data.lint import LintFinding, LintKind, LintReport, LintSeverity, lint
from turnwise.data.write import write_rows
from turnwise.errors import DataError


def row(prompt: Any = "hi", **columns: Any) -> dict[str, Any]:
    return {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "1"}} | columns


def check(folder: Path, *rows: dict[str, Any], name: str = "train.jsonl") -> LintReport:
    write_rows(rows, folder / name)
    return lint([folder / name], prompt_key="prompt")


def test_good_rows_give_nothing(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    calling = row([{"role": "user", "content": "c"}, call, {"role": "tool", "content": "5"}])
    report = check(tmp_path, row("a"), row([{"role": "user", "content": "b"}], data_source="t"), calling)
    assert report.findings == []
    assert (report.rows, report.errors, report.warnings) == (3, 0, 0)
    assert report.data_sources == Counter(s=2, t=1)


@pytest.mark.parametrize(
    ("columns", "kind", "field"),
    [
        ({"prompt": 3}, LintKind.REFUSED, "prompt"),
        ({"extra_info": {"need_tools_kwargs": True}}, LintKind.MISSING_TOOLS_KWARGS, "extra_info.tools_kwargs"),
        ({"agent_nmae": "x"}, LintKind.MISSPELT, "agent_nmae"),
        ({"prompt": " "}, LintKind.EMPTY_PROMPT, "prompt"),
        ({"prompt": [{"role": "user", "content": []}]}, LintKind.EMPTY_PROMPT, "prompt"),
        (
            {"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "x"}]},
            LintKind.EMPTY_MESSAGE,
            "prompt[0].content",
        ),
        ({"reward_model": None}, LintKind.NO_GROUND_TRUTH, "reward_model.ground_truth"),
        ({"reward_model": {"ground_truth": " "}}, LintKind.NO_GROUND_TRUTH, "reward_model.ground_truth"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, LintKind.LAST_MESSAGE, "prompt[0].role"),
        ({"prompt": "see <image>"}, LintKind.UNUSED_MARKER, "prompt"),
    ],
)
def test_each_kind_of_row(tmp_path: Path, columns: dict[str, Any], kind: LintKind, field: str) -> None:
    report = check(tmp_path, row("fine"), row(**columns))
    assert [(finding.kind, finding.file, finding.row, finding.field) for finding in report.findings] == [
        (kind, "train.jsonl", 1, field)
    ]
    assert report.findings[0].severity is kind.severity
    assert str(report.findings[0]).startswith(f"{kind.severity}: train.jsonl row 1: {field}: ")


def test_a_nan_ground_truth_counts_as_missing(tmp_path: Path) -> None:
    report = check(tmp_path, row(reward_model={"ground_truth": float("nan")}), name="train.parquet")
    assert report.counts == Counter({LintKind.NO_GROUND_TRUTH: 1})


def test_findings_about_a_whole_file(tmp_path: Path) -> None:
    named = {"interaction_kwargs": {"name": "gsm8k", "q": "?"}}
    report = check(tmp_path, row("a", extra_info=named), row("b", extra_info={"index": 1}), row("c", extra_info=named))
    assert [(f.kind, f.row, f.text) for f in report.findings] == [
        (LintKind.MIXED_INTERACTION, None, "2 rows name an interaction, 1 do not")
    ]
    (tmp_path / "n.jsonl").write_text('{"data_source": "s", "prompt": "x", "agent_name": null, "uid": null}\n')
    report = lint([tmp_path / "n.jsonl"], prompt_key="prompt")
    assert [(f.kind, f.field) for f in report.findings if f.row is None] == [
        (LintKind.NULL_COLUMN, "agent_name"),
        (LintKind.NULL_COLUMN, "uid"),
    ]


def test_indexes_are_compared_within_a_file_and_prompts_between_files(tmp_path: Path) -> None:
    write_rows([row("a", extra_info={"index": 0}), row("b", extra_info={"index": 0})], tmp_path / "train.jsonl")
    write_rows([row("b", extra_info={"index": 0}), row("c"), row("c")], tmp_path / "test.parquet")
    report = lint([tmp_path / "train.jsonl", tmp_path / "test.parquet"], prompt_key="prompt")
    assert report.findings == [
        LintFinding(LintKind.DUPLICATE_INDEX, "train.jsonl", 1, "extra_info.index", "the same as row 0"),
        LintFinding(LintKind.DUPLICATE_PROMPT, "test.parquet", 0, "prompt", "the same as train.jsonl row 1"),
    ]
    assert {finding.severity for finding in report.findings} == {LintSeverity.WARNING}


def test_examples_are_limited_and_counts_are_not(tmp_path: Path) -> None:
    rows = [row(n, agent_nmae="x") for n in range(30)] + [row(str(n), reward_model=None) for n in range(5)]
    write_rows(rows, tmp_path / "train.jsonl")
    report = lint([tmp_path / "train.jsonl"], prompt_key="prompt", limit=3)
    assert report.counts == {LintKind.REFUSED: 30, LintKind.NO_GROUND_TRUTH: 5, LintKind.MISSPELT: 1}
    assert Counter(finding.kind for finding in report.findings) == {
        LintKind.REFUSED: 3,
        LintKind.NO_GROUND_TRUTH: 3,
        LintKind.MISSPELT: 1,
    }
    assert (report.rows, report.errors, report.warnings) == (35, 31, 5)


def test_an_unreadable_file_is_a_finding_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"data_source": "s", "prompt": "x"}\n{"oops')
    write_rows([row("a")], tmp_path / "good.jsonl")
    report = lint([tmp_path / "bad.jsonl", tmp_path / "no.parquet", tmp_path / "good.jsonl"], prompt_key="prompt")
    unreadable = [finding for finding in report.findings if finding.kind is LintKind.UNREADABLE]
    assert [finding.file for finding in unreadable] == ["bad.jsonl", "no.parquet"]
    assert "bad.jsonl:2: not valid JSON" in unreadable[0].text
    assert (report.rows, report.data_sources) == (2, Counter(s=2))
    with pytest.raises(DataError):
        lint([], prompt_key="prompt")

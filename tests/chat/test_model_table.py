"""The table of `make test-models`, of two templates made here: one that drops thoughts, one whose calls nothing reads."""

import json
from pathlib import Path

import pytest
from model_table import TASKS, course, main
from test_format_trial import WRITTEN, chatml

THOUGHTLESS = chatml(WRITTEN["hermes"]).replace(
    "{{ m.content or '' }}", "{{ (m.content or '').split('</think>')[-1] }}"
)
"""Drops the thoughts of every message that something follows or not."""


def test_each_template_is_a_line_with_what_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "appends.jinja").write_text(chatml(WRITTEN["hermes"]))
    (folder / "drops.jinja").write_text(THOUGHTLESS)
    (folder / "unread.jinja").write_text(chatml("<call tool={{ name }}>{{ given | tojson }}</call>"))
    (folder / "drops_training.jinja").write_text("another template of the same model")
    rows = {row.name: row for row in main([str(folder), "--modes", "default", "--json", str(tmp_path / "all.json")])}
    assert list(rows) == ["appends", "drops", "unread"]
    assert [rows["appends"].format, course(rows["appends"], TASKS[1])] == ["hermes", "append"]
    assert "segment" in course(rows["drops"], TASKS[1]) and all(times > 1 for _, times in rows["drops"].prices)
    assert course(rows["unread"], TASKS[0]) == "refused"
    assert all("<call tool=look_up>" in reason for reason in rows["unread"].refused.values())
    printed = capsys.readouterr().out
    assert "| ours | appends | hermes | ok | ok | append | append |" in printed
    assert "ours: 3 templates, tools and a user: default 2" in printed
    assert len(json.loads((tmp_path / "all.json").read_text())) == 3

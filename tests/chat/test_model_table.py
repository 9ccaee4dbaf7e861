"""The table of `make test-models`, of templates made here: one that drops thoughts, one whose calls nothing reads."""

import json
from pathlib import Path

import pytest
from model_table import TASKS, course, main
from test_detect_format import WRITTEN, chatml

THOUGHTLESS = chatml(WRITTEN["hermes"]).replace(
    "{{ m.content or '' }}", "{{ (m.content or '').split('</think>')[-1] }}"
)
"""Drops the thoughts of every message that something follows or not."""
WITHIN_A_TURN = (
    "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- if loop.previtem.role != 'tool' -%}<|im_start|>assistant\n{% endif -%}"
    "{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{%- endfor -%}'
    "{%- set at = namespace(here=true) -%}{%- for r in messages[loop.index:] -%}{%- set at.here = at.here and r.role == 'tool' -%}"
    "{%- if at.here -%}<tool_response>{{ r.content }}</tool_response>{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ m.content }}{%- if not m.tool_calls -%}<|im_end|>\n{% endif -%}"
    "{%- elif m.role != 'tool' -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' -%}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif -%}"
)
"""As Gemma 4's: results stand in the turn of the call, words after them, and the header's empty thought goes."""


def test_each_template_is_a_line_with_what_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "appends.jinja").write_text(chatml(WRITTEN["hermes"]))
    (folder / "drops.jinja").write_text(THOUGHTLESS)
    (folder / "unread.jinja").write_text(chatml("<call tool={{ name }}>{{ given | tojson }}</call>"))
    (folder / "within.jinja").write_text(WITHIN_A_TURN)
    (folder / "drops_training.jinja").write_text("another template of the same model")
    rows = {row.name: row for row in main([str(folder), "--modes", "default", "--json", str(tmp_path / "all.json")])}
    assert list(rows) == ["appends", "drops", "unread", "within"]
    assert [rows["appends"].format, course(rows["appends"], TASKS[1])] == ["hermes", "append"]
    assert "segment" in course(rows["drops"], TASKS[1]) and all(times > 1 for _, times in rows["drops"].prices)
    assert course(rows["unread"], TASKS[0]) == "refused" != course(rows["within"], TASKS[0])
    assert all("<call tool=look_up>" in reason for reason in rows["unread"].refused.values())
    printed = capsys.readouterr().out
    assert "| ours | appends | hermes | ok | ok | append | append |" in printed
    assert "ours: 4 templates, tools and a user: default 3" in printed
    assert len(json.loads((tmp_path / "all.json").read_text())) == 4

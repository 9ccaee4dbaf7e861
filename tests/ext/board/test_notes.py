"""A note and tags of a run: written by the command, shown by the board, and whatever else is in the file is told."""

import json
import time

import pytest

from turnwise.commands.cli import main
from turnwise.ext.board.notes import NOTES, Notes, read_notes
from turnwise.ext.board.runs import Runs


def test_the_command_writes_them_and_the_list_has_them(run_dir, capsys):
    path = str(run_dir.path)
    assert main(["note", path]) == 0 and capsys.readouterr().out == "no note\nno tags\n"
    assert main(["note", path, "as in <b>June</b>\n", "--tag", "baseline", "--tag", "a tag"]) == 0
    assert capsys.readouterr().out == "as in <b>June</b>\ntags: baseline, a tag\n"
    summary = Runs([run_dir.path]).open("first").summary(time.time())
    assert (summary["note"], summary["tags"]) == ("as in <b>June</b>", ["baseline", "a tag"])
    assert main(["note", path, "--untag", "a tag", "--tag", "baseline"]) == 0
    assert read_notes(run_dir) == Notes(note="as in <b>June</b>", tags=["baseline"])
    assert main(["note", path, ""]) == 0 and read_notes(run_dir).note == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tag", "a,b"], "'a,b' is no tag"),
        (["--tag", "x" * 41], "is no tag: 1 to 40 letters"),
        (["--tag", "a\x1b[31m"], "is no tag"),
        (["--untag", "never"], "the run has no tag 'never'; it has: none"),
        (["x" * 4001], "note: String should have at most 4000"),
    ],
)
def test_what_is_no_tag_is_refused_and_changes_nothing(run_dir, capsys, arguments, said):
    assert main(["note", str(run_dir.path), *arguments]) == 2
    assert said in capsys.readouterr().err and not (run_dir.path / NOTES).exists()


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"tags": "a"}', '{"tags": [""]}', json.dumps({"note": "x" * 5000}), '{"more": 1}', "x" * 10**6],
)
def test_a_damaged_file_is_told_and_the_run_is_shown(run_dir, content):
    run_dir.write_text(NOTES, content)
    summary = Runs([run_dir.path]).open("first").summary(time.time())
    assert NOTES in summary["problems"][0] and summary["tags"] == []

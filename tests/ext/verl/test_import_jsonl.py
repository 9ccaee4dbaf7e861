"""`turnwise import-jsonl`: what it prints, and how it fails."""

import argparse
import json

import pytest

from turnwise.errors import ConfigError, DataError
from turnwise.ext.verl import import_command as import_jsonl


def call(*words):
    parser = argparse.ArgumentParser()
    import_jsonl.add_arguments(parser)
    return import_jsonl.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / "7.jsonl"
    rows = [{"input": "6*7?", "output": answer, "gts": "42", "score": float(answer == "42")} for answer in ("42", "41")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_says_what_it_did(dump, tmp_path, capsys):
    assert call(dump, "--out", tmp_path / "runs/new", "--json") == 0
    *text, last = capsys.readouterr().out.strip().splitlines()
    assert text[0] == "imported 2 lines of 1 files: 1 training steps, 0 evaluations, 1 groups"
    assert text[-1] == f"run directory: {tmp_path / 'runs/new'}"
    said = json.loads(last)
    assert (said["lines"], said["groups"], said["markers"]) == (2, 1, {"none": 2})


def test_the_board_and_show_can_read_it(dump, tmp_path, capsys):
    from turnwise.commands.cli import main

    call(dump, "--out", tmp_path / "runs/new")
    capsys.readouterr()
    assert main(["show", str(tmp_path / "runs/new"), "--sample", "1"]) == 0
    assert "41" in capsys.readouterr().out


def test_mistakes_are_told(dump, tmp_path):
    with pytest.raises(ConfigError, match="unknown format 'varl': did you mean 'verl'"):
        call(dump, "--out", tmp_path / "new", "--format", "varl")
    with pytest.raises(DataError, match="line 1 has not the shape rl_logging_board"):
        call(dump, "--out", tmp_path / "new", "--format", "rl_logging_board")
    with pytest.raises(ConfigError, match="--images .* is not a folder"):
        call(dump, "--out", tmp_path / "new", "--images", tmp_path / "none")


def test_bad_lines_are_counted_when_asked(dump, tmp_path, capsys):
    with dump.open("a") as file:
        file.write("oops\n")
    with pytest.raises(DataError, match=r"7\.jsonl, line 3 is not JSON.*--skip-bad"):
        call(dump, "--out", tmp_path / "new")
    assert call(dump, "--out", tmp_path / "new", "--skip-bad") == 0
    assert "1 bad lines left out, the first:" in capsys.readouterr().out

"""`turnwise report`: what it writes, what it refuses, what it says."""

import argparse

import pytest

from turnwise.errors import ConfigError, StorageError
from turnwise.ext.board import report_command as report


@pytest.fixture
def run_path(tmp_path):
    path = tmp_path / "runs" / "first"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("seed: 1\n")
    return path


def call(*words):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.run(parser.parse_args([str(word) for word in words]))


def test_it_writes_one_file_and_says_how_large(run_path, tmp_path, capsys):
    out = tmp_path / "new" / "report.html"
    assert call(run_path, "--out", out) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    said = capsys.readouterr()
    assert said.out == f"{out}: {out.stat().st_size / 1e6:.1f} MB, 0 trajectories\n"
    assert said.err == ""
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


def test_an_existing_file_is_kept_unless_forced(run_path, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        call(run_path, "--out", out)
    assert out.read_text() == "mine"
    assert call(run_path, "--out", out, "--force") == 0
    assert out.read_text(encoding="utf-8") != "mine"


def test_what_makes_no_sense_is_refused_before_anything_is_written(run_path, tmp_path):
    out = tmp_path / "report.html"
    with pytest.raises(ConfigError, match="a folder"):
        call(run_path, "--out", tmp_path)
    with pytest.raises(ConfigError, match="between 0 and"):
        call(run_path, "--out", out, "--trajectories", -1)
    with pytest.raises(StorageError, match="did you mean 'first'"):
        call(run_path.parent / "frist", "--out", out)
    with pytest.raises(ConfigError, match="passes none"):
        call(run_path, "--out", out, "--filter", "reward > 0")
    assert not out.exists()


def test_what_is_damaged_and_what_is_large_is_said(run_path, tmp_path, capsys, monkeypatch):
    folder = run_path / "trajectories"
    folder.mkdir()
    for step in range(10):
        (folder / f"step_{step:06d}.parquet").write_bytes(b"no parquet")
    monkeypatch.setattr(report, "LARGE", 1_000_000)
    out = tmp_path / "report.html"
    assert call(run_path, "--out", out) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("left out") for line in said] == [True] * 8 + [False] * 2
    assert said[8] == "and 2 more that cannot be read"
    assert said[9] == f"{out} has {out.stat().st_size / 1e6:.0f} MB; a smaller --trajectories makes it smaller"

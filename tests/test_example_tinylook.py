"""examples/tinylook: both rewards train the bundled model, probes, and a report with images."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "tinylook"


def test_its_parts_are_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--help"])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")
    assert ended.value.code == 0 and "--smoke" in capsys.readouterr().out


@pytest.mark.long  # tests/ext/tinylook has the task and its rewards, tests/reports the probes
def test_both_rewards_train_it_once_and_all_is_probed_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--smoke", "--out", str(tmp_path), "--set", "engine.threads=1"]
    monkeypatch.setattr(sys, "argv", ["run.py", *given])
    monkeypatch.syspath_prepend(str(FOLDER))
    said = _run()
    assert "== tapo, seed 0: 1 steps" in said and "== accuracy, seed 0: 1 steps" in said
    found = json.loads((tmp_path / "report" / "results.json").read_text(encoding="utf-8"))
    assert {*found["runs"]} == {"tapo_0", "accuracy_0"} and {*found["probes"]} == {"cold_start", "tapo_0", "accuracy_0"}
    for run in found["runs"].values():
        assert [sum(one["n"] for one in run[when].values()) for when in ("before", "after")] == [8, 8]
    page = (tmp_path / "report" / "README.md").read_text(encoding="utf-8")
    assert "| share right | no tool | cold start | right answers alone, seed 0 | TAPO, seed 0 |" in page
    shown = (tmp_path / "report" / "episodes.md").read_text(encoding="utf-8")
    assert "![what was shown](tapo_0_" in shown and [*(tmp_path / "report").glob("tapo_0_*.png")]
    assert "| needs a look: blank | " in page
    assert str(tmp_path) not in page + shown
    runs = sorted((tmp_path / "runs").iterdir())
    _run()
    assert sorted((tmp_path / "runs").iterdir()) == runs, "what is done is not repeated"


def _run() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")
    return out.getvalue()

"""The recipe of examples/gsm8k_smollm2: every stage with the bundled model, and solutions as demonstrations."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.storage.trajectories.files import read_trajectories

FOLDER = Path(__file__).parent.parent / "examples" / "gsm8k_smollm2"
CLIPS = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.fixture
def task() -> Any:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "task.py")))


def test_a_solution_becomes_turns_with_calls_and_a_last_step_once_more(task: Any) -> None:
    assert task.spoken(CLIPS) == [
        "Natalia sold 48/2 = <<48/2>>", "24 clips in May.\nIn all 48+24 = <<48+24>>", "72 clips.\n#### 72",
        "48+24 = <<48+24>>", "72\n#### 72",
    ]  # fmt: skip


def test_results_are_written_as_the_calculator_says_them(task: Any) -> None:
    assert task.spoken("Half is $<<1/2=.5>>.5 now.\n#### 1,000")[1:3] == ["0.5 now.\n#### 1000", "1/2 = <<1/2>>"]


@pytest.mark.parametrize("answer", ["It is 5.\n#### 5", "<<2+2=5>>5\n#### 5", "<<2 apples=2>>2\n#### 2", "<<1/0=0>>0"])
def test_a_solution_that_does_not_add_up_is_no_demonstration(task: Any, answer: str) -> None:
    assert task.spoken(answer) == []


@pytest.mark.long  # each stage is a command that other tests run; what the recipe itself does is tested above
def test_every_stage_runs_and_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for split, count in (("train", 6), ("test", 2)):
        rows = [{"question": f"{split} {n}: 48 clips, then half?", "answer": CLIPS} for n in range(count)]
        (source / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = ["--smoke", "--model", "tiny", "--source", str(source), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["run.py", *given, "--set", "engine.threads=1"])
    monkeypatch.syspath_prepend(str(FOLDER))
    said, found, runs = _run(), tmp_path / "out" / "report", tmp_path / "out" / "runs"
    assert "demonstrations.parquet 6 rows" in said and "| after RL, seed 0 |" in said
    results = json.loads((found / "results.json").read_text())
    assert results["demonstrations"] == {"played": 6, "right": 6}
    assert {*results["seeds"]["0"]["rl"]} >= {"greedy", "sampled", "steps"} and (found / "curve.svg").stat().st_size
    assert str(tmp_path) not in "".join((found / name).read_text() for name in ("README.md", "results.json"))
    (played,) = {len(one.turns) for one in read_trajectories(runs / "demonstrations" / "eval" / "step_000000.parquet")}
    assert played == len(("two calls", "answer", "call", "answer")) + 1
    again = _run()
    assert "== RL 0: 1 steps" in again and not re.search("== (before|demonstrations)", again)


@pytest.mark.parametrize("stage", ["--sft", "--rl", "--set"])
def test_a_mistake_in_any_stage_is_found_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["run.py", "--model", "tiny", "--out", str(out), stage, "learner.lrr=1"])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as ended:
        _run()
    assert ended.value.code == 2 and "did you mean 'learner.lr'" in capsys.readouterr().err
    assert not out.exists()


def _run() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")
    return out.getvalue()

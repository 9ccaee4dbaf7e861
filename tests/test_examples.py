"""The Python programs of examples/ and docs/ run as they stand, and say what they promise."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from turnwise import configure, train
from turnwise.commands.cli import main
from turnwise.storage.run_dir import RunDir

ROOT = Path(__file__).parent.parent


def example(name: str, *overrides: str, cwd: Path, patch: pytest.MonkeyPatch) -> str:
    """What a program prints, run in this process: importing torch takes longer than the example."""
    folder, out = ROOT / "examples" / "python", io.StringIO()
    patch.setattr(sys, "argv", [name, "engine.threads=1", *overrides])
    patch.syspath_prepend(str(folder))
    patch.setenv("COLUMNS", "200")
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out):
        runpy.run_path(str(folder / name), run_name="__main__")
    return out.getvalue()


def test_a_task_of_ones_own_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = example("evaluate.py", "run=a", cwd=tmp_path, patch=monkeypatch)
    assert re.search(r"accuracy, final answer .*% ± [\d.]+ \(n=4\)", said)
    found = json.loads((tmp_path / "runs" / "a" / "eval" / "step_000000.json").read_text())
    assert found["n"] == 4 and found["accuracy_stderr"] > 0
    assert found["sources"]["boxes"]["tools"]["calculate"]["calls"] >= 4
    assert found["sources"]["boxes"]["stop_reasons"]["user_ended"] >= 3


def test_a_task_of_ones_own_is_trained_and_resumed_only_with_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("run=a", "training.groups=2", "training.group_size=2", "sampling.max_tokens=12", "training.steps=1")
    said = example("train.py", *small, cwd=tmp_path, patch=monkeypatch)
    assert re.search(r" accuracy .*% ± [\d.]+ \(n=4\)", said) and "reward: " in said
    assert (
        'turnwise.train(turnwise.configure(..., "run=a", "resume=auto", "training.steps=2"), samples=..., eval_' in said
    )
    assert "algorithm    advantage grpo, loss ppo_clip" in (tmp_path / "runs" / "a" / "plan.txt").read_text()
    with contextlib.chdir(tmp_path):
        assert main(["train", "run=a", "resume=auto"]) == 2
    assert "was given samples=" in capsys.readouterr().err
    assert "all 2 steps done" in example(
        "train.py", *small[:-1], "training.steps=2", "resume=auto", cwd=tmp_path, patch=monkeypatch
    )


@pytest.fixture
def own_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_advantage_and_the_loss_of_the_docs_train(own_algorithm: Path) -> None:
    config = configure(
        "run=a", "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=3", "training.group_size=4",
        "training.steps=1", "eval.samples=2", "engine.threads=1", "sampling.max_tokens=40", "training.samples=12",
        "algorithm.advantage=mine.py:best_of_group", "algorithm.loss=mine.py:smooth",
    )  # fmt: skip
    report = train(config)
    (line,) = [one for one in RunDir.open(report.run).read_jsonl("metrics.jsonl") if "critic/score/mean" in one]
    if line["critic/score/max"] > line["critic/score/min"]:
        assert {line["critic/advantages/max"], line["critic/advantages/min"]} == {1.0, -1.0}
        assert line["actor/grad_norm"] > 0
    assert "advantage mine.py:best_of_group, loss mine.py:smooth" in (report.run / "plan.txt").read_text()

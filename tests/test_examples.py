"""The Python programs of examples/ and docs/ run as they stand, and say what they promise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise import configure, train
from turnwise.storage.run_dir import RunDir

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def example(name: str, *overrides: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "python" / name), "engine.threads=1", *overrides],
        cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_task_of_ones_own_is_evaluated(tmp_path: Path) -> None:
    said = example("evaluate.py", "run=a", cwd=tmp_path)
    assert re.search(r"accuracy, final answer .*% ± [\d.]+ \(n=4\)", said)
    found = json.loads((tmp_path / "runs" / "a" / "eval" / "step_000000.json").read_text())
    assert found["n"] == 4 and found["accuracy_stderr"] > 0
    assert found["sources"]["boxes"]["tools"]["calculate"]["calls"] >= 4
    assert found["sources"]["boxes"]["stop_reasons"]["user_ended"] >= 3


def test_a_task_of_ones_own_is_trained_and_goes_on_only_with_what_it_was_given(tmp_path: Path) -> None:
    small = ("run=a", "training.groups=2", "training.group_size=2", "sampling.max_tokens=12", "training.steps=1")
    said = example("train.py", *small, cwd=tmp_path)
    assert re.search(r"accuracy/boxes .*% ± [\d.]+ \(n=4\)", said) and "reward: " in said
    assert (
        'turnwise.train(turnwise.configure(..., "run=a", "resume=auto", "training.steps=2"), samples=..., eval_' in said
    )
    assert "algorithm    advantage grpo, loss ppo_clip" in (tmp_path / "runs" / "a" / "plan.txt").read_text()
    done = subprocess.run(
        [sys.executable, "-c", "from turnwise.cli import main; raise SystemExit(main())", "train", "run=a", "resume=auto"],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "was given samples=" in done.stderr
    assert "all 2 steps done" in example("train.py", *small[:-1], "training.steps=2", "resume=auto", cwd=tmp_path)


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

"""The pages on tasks, users and environments: their code and examples run as they stand."""

import contextlib
import re
from pathlib import Path

import pytest
from rich.console import Console

from turnwise import evaluate, train
from turnwise.commands.cli import main
from turnwise.data.task_config import configure

ROOT = Path(__file__).parent.parent
QUIET = Console(quiet=True)


def page(name: str, language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    return code


def test_a_newcomers_task_is_short_checked_evaluated_and_trained(tmp_path: Path) -> None:
    code = page("add-a-task.md", "python")
    assert code.count("\n") < 40
    (tmp_path / "colours.py").write_text(code)
    with contextlib.chdir(tmp_path):
        assert main(["check", "task=colours.py"]) == 0
        said = configure("task=colours.py", "engine=scripted")
        call = '<tool_call>\n{"name": "mix", "arguments": {"first": "yellow", "second": "blue"}}\n</tool_call>'
        said.engine.script = [call, "It is green.", "Green"]
        report = evaluate(said, console=QUIET)
        assert report.accuracy == pytest.approx(1 / 3) and len(report.trajectories) == 3
        assert [call.call.name for call in report.trajectories[0].calls] == ["mix"]
        small = ("training.steps=1", "training.group_size=2", "sampling.max_tokens=8")
        trained = train(configure("task=colours.py", *small), console=QUIET)
    assert '"step": 1' in (trained.run / "metrics.jsonl").read_text()


def test_the_scripted_user_of_the_page_is_the_examples(tmp_path: Path) -> None:
    example = ROOT / "examples" / "users" / "user.yaml"
    assert page("users.md", "yaml") == example.read_text()
    config = configure(
        "rollout.interaction=scripted", f"rollout.interaction_kwargs.file={example}", "engine=scripted",
        "eval.samples=2", f"runs_dir={tmp_path}", "scoring.scorers.default=interaction",
    )  # fmt: skip
    config.engine.script = ["Hm.", "Hm.", "#### 0"]
    one = evaluate(config, console=QUIET).trajectories[0]
    assert [turn.replies[0].text for turn in one.turns if turn.replies] == [
        "Please end with #### and the number.",
        "Please end with #### and the number.",
        "Please use the calculator.",
        "I do not think so. Try again.",
        "I do not think so. Try again.",
    ]
    assert one.reward == 0.0


def test_the_lake_is_crossed(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    config = configure(f"task={ROOT / 'examples' / 'users' / 'lake.py'}", "engine=scripted", f"runs_dir={tmp_path}")
    config.engine.script = [f"Action: {way}" for way in ("down", "down", "right", "right", "down", "right")]
    report = evaluate(config, console=QUIET)
    assert report.accuracy == 1.0 and len(report.trajectories) == 8

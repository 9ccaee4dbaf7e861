"""Environments of the installed verifiers package, evaluated and trained: one turn, tools, several turns, refusals."""

import importlib.util
import os
from pathlib import Path

import pytest
from rich.console import Console

from turnwise import evaluate, train
from turnwise.data.task_config import configure
from turnwise.errors import ConfigError, PluginError
from turnwise.types import Role, StopReason, Trajectory

QUIET = Console(quiet=True)
ENVIRONMENTS = Path(__file__).parent / "verifiers_envs"
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "hat"}}\n</tool_call>'


def is_there() -> bool:
    return importlib.util.find_spec("verifiers") is not None and importlib.util.find_spec("verifiers.v1") is not None


pytestmark = pytest.mark.skipif(not is_there(), reason="verifiers 0.4 is not installed: make test-peers runs this")


@pytest.fixture(autouse=True)
def _environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their packages are found, by this process and by the tool servers that it starts."""
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ENVIRONMENTS), os.environ.get("PYTHONPATH", "")]))


def task_file(folder: Path, name: str, options: str = 'env={"agent": {"harness": {"id": "tw_chat"}}}') -> Path:
    file = folder / f"{name}_task.py"
    file.write_text(
        "from turnwise.ext.verifiers.task import environment_task\n"
        f'TASK = environment_task("{name}", holdout=2, {options})\n'
    )
    return file


def episodes(folder: Path, task: Path, script: list[str], *overrides: str) -> list[Trajectory]:
    config = configure(
        f"task={task}", "engine=scripted", f"runs_dir={folder}", "board.live=false", "eval.samples=2", *overrides
    )
    config.engine.script = script
    return evaluate(config, console=QUIET).trajectories


def test_one_turn_with_rewards_and_metrics_as_parts(tmp_path: Path) -> None:
    first, second = episodes(tmp_path, task_file(tmp_path, "tw_sums"), ["It is 2."])
    assert [message.text for message in first.messages] == ["Add.", "What is 1+1?", "It is 2."]
    assert first.reward == 2.0 and first.parts == {"correct": 1.0, "length": 8.0, "finished": 1.0}
    assert second.reward == 0.0 and second.sample.data_source == "tw_sums"
    (ledger,) = first.segments
    assert ledger.loss_mask.sum() == first.turns[0].completion_tokens > 0


def test_tools_of_the_environment_are_called_by_its_own_code(tmp_path: Path) -> None:
    first, _ = episodes(tmp_path, task_file(tmp_path, "tw_shop"), [CALL, "It costs 12."])
    assert first.failure is None and first.reward == 1.0
    assert [message.role for message in first.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert first.messages[2].text == "12" and len(first.segments) == 1


def test_several_turns_are_one_sequence(tmp_path: Path) -> None:
    task = task_file(tmp_path, "tw_guess", 'env={"player": {"harness": {"id": "tw_chat"}}}')
    first, _ = episodes(tmp_path, task, ["3", "5", "7"])
    assert (
        first.failure is None and first.reward == 1.0 and first.parts == {"won": 1.0, "guesses": 3.0, "finished": 1.0}
    )
    assert [turn.message.text for turn in first.turns] == ["3", "5", "7"] and not first.branches
    assert [message.text for message in first.messages if message.role is Role.USER][1:] == ["No. Guess again."] * 2


def test_a_spent_budget_is_no_reward_of_the_environment(tmp_path: Path) -> None:
    task = task_file(tmp_path, "tw_guess", 'env={"player": {"harness": {"id": "tw_chat"}}}')
    first, _ = episodes(tmp_path, task, ["3", "5", "7"], "rollout.max_assistant_turns=2")
    assert first.stop_reason is StopReason.ASSISTANT_TURN_BUDGET and first.failure is None
    assert first.reward == 0.0 and first.parts == {"finished": 0.0}


def test_the_bundled_model_is_trained_on_it(tmp_path: Path) -> None:
    config = configure(
        f"task={task_file(tmp_path, 'tw_sums')}", "training.steps=1", "training.groups=2", "training.group_size=2",
        "sampling.max_tokens=12", "engine.threads=1", f"runs_dir={tmp_path}", "board.live=false",
    )  # fmt: skip
    report = train(config, console=QUIET)
    assert report.steps == 1


@pytest.mark.parametrize(
    ("name", "options", "kind", "text"),
    [
        ("tw_sums", "", ConfigError, "would run the model's commands on this machine"),
        ("tw_nowhere", "", PluginError, "cannot be loaded"),
        ("tw_sums", "cuont=3", PluginError, "cuont"),
        ("tw_sums", "count=object()", ConfigError, "texts, numbers, lists"),
    ],
)
def test_refusals(tmp_path: Path, name: str, options: str, kind: type[Exception], text: str) -> None:
    with pytest.raises((kind, PluginError), match=text):
        episodes(tmp_path, task_file(tmp_path, name, options), ["2"])


def test_by_name_alone(tmp_path: Path) -> None:
    """`task=verifiers:ENV_ID`: its default harness runs commands, which is refused before anything is written."""
    with pytest.raises(ConfigError, match=r"agent.*harness.*null"):
        configure("task=verifiers:tw_sums", f"runs_dir={tmp_path}/runs")
    assert not (tmp_path / "runs").exists()

"""docs/agents.md: its files and commands run as they stand, and a trained branch reaches the learner."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from turnwise.commands.cli import main
from turnwise.storage.trajectories.files import read_trajectories

PAGE = (Path(__file__).parent.parent / "docs" / "agents.md").read_text()
SMALL = (
    "eval.samples=2",
    "rollout.tools=[calculate]",
    "rollout.interaction=null",
    "sampling.max_tokens=12",
    "rollout.max_assistant_turns=4",
    "board.live=false",
)
COMMANDS = re.findall(r"^    turnwise ((?:.*\\\n)*.*)$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all commands, as a reader has it."""
    tmp_path = tmp_path_factory.mktemp("page")
    for name, content in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(content)
    return tmp_path


def test_the_page_has_its_commands(folder: Path) -> None:
    assert len(COMMANDS) == 4
    assert {path.name for path in folder.iterdir()} == {"my_loop.py", "my_vote.py", "my_task.py", "agents.yaml"}


@pytest.mark.parametrize("number", range(4))
def test_commands_of_the_page(number: int, folder: Path) -> None:
    words, run = shlex.split(COMMANDS[number].replace("\\\n", " ")), f"r{number}"
    with contextlib.chdir(folder):
        assert main([*words, *SMALL, "engine=scripted", "engine.script=['It is 7.']", f"run={run}"]) == 0
        trajectories = read_trajectories(Path("runs", run, "eval/step_000000.parquet"))
    assert len(trajectories) == 2 and all(one.failure is None for one in trajectories)


def test_branches_side_by_side_are_trained(folder: Path) -> None:
    """Two voters at once and the main conversation of the bundled model: three sequences with one reward."""
    training = ("training.steps=1", "training.groups=2", "training.group_size=2", "algorithm.advantage=reinforce_pp")
    with contextlib.chdir(folder):
        assert main(["train", "rollout.agent=my_vote.py:vote", *training, *SMALL, "engine.threads=1", "run=t"]) == 0
        trajectories = read_trajectories(Path("runs/t/trajectories/step_000001.parquet"))
    for one in trajectories:
        assert [branch.name for branch in one.branches] == ["voter 0", "voter 1"] and len(one.segments) == 3
        assert all(ledger.training is not None for ledger in one.segments)
        assert one.prompt[-1].text.startswith("One says: ")

"""docs/ext/trl.md: its files and commands run as they stand."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from turnwise.commands.cli import main
from turnwise.storage.trajectories.files import read_trajectories

PAGE = (Path(__file__).parents[3] / "docs" / "ext" / "trl.md").read_text()
COMMANDS = re.findall(r"^    turnwise (.*)$", PAGE, re.MULTILINE)
SCRIPTED = ("engine=scripted", "engine.script=['<think>2 and 3</think> It is 5.']", "board.live=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all commands, as a reader has it."""
    folder = tmp_path_factory.mktemp("page")
    for name, content in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (folder / name).write_text(content)
    (rows,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (folder / "rows.jsonl").write_text(rows)
    return folder


def test_the_page_has_its_commands(folder: Path) -> None:
    assert len(COMMANDS) == 4
    assert {path.name for path in folder.iterdir()} == {"rewards.py", "my_tools.py", "rows.jsonl"}


@pytest.mark.parametrize(("number", "rewards"), [(0, [1.0, 0.0]), (1, [1.5, 0.5]), (2, [1.0, 1.0])])
def test_rewards_of_the_page(number: int, rewards: list[float], folder: Path) -> None:
    if "trl." in COMMANDS[number]:
        pytest.importorskip("trl")
    with contextlib.chdir(folder):
        assert main([*shlex.split(COMMANDS[number]), *SCRIPTED, f"run=r{number}"]) == 0
        trajectories = read_trajectories(Path(f"runs/r{number}/eval/step_000000.parquet"))
    assert [one.reward for one in trajectories] == rewards


def test_tools_of_the_page(folder: Path) -> None:
    with contextlib.chdir(folder):
        assert main([*shlex.split(COMMANDS[3]), *SCRIPTED, "rollout.interaction=null"]) == 0

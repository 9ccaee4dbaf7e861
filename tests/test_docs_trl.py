"""docs/coming-from-trl.md: its files and commands run as they stand."""

import contextlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.storage.trajectories import read_trajectories

PAGE = (Path(__file__).parent.parent / "docs" / "coming-from-trl.md").read_text()
COMMANDS = re.findall(r"^    turnwise (.*)$", PAGE, re.MULTILINE)
SCRIPTED = ("engine=scripted", "engine.script=['<think>2 and 3</think> It is 5.']", "board=false")


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
    assert len(COMMANDS) == 6
    assert {path.name for path in folder.iterdir()} == {"rewards.py", "my_tools.py", "sums_task.py", "rows.jsonl"}


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


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers 0.4 is not installed")
@pytest.mark.parametrize("number", [4, 5])
def test_environments_of_the_page(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "compat" / "verifiers_envs")
    words = shlex.split(COMMANDS[number])
    more = SCRIPTED if words[0] == "eval" else ("sampling.max_tokens=12", "engine.threads=1", "board=false")
    with contextlib.chdir(folder):
        assert main([*words, *more]) == 0


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")
def test_without_verifiers_its_absence_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "task=verifiers:tw_sums"]) == 2
    assert "environments of verifiers need it installed" in "".join(capsys.readouterr())

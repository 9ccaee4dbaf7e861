"""docs/ext/verifiers.md: its file and commands run as they stand, where verifiers is installed."""

import contextlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from turnwise.commands.cli import main

PAGE = (Path(__file__).parents[3] / "docs" / "ext" / "verifiers.md").read_text()
COMMANDS = re.findall(r"^    turnwise (.*)$", PAGE, re.MULTILINE)
SCRIPTED = ("engine=scripted", "engine.script=['<think>2 and 3</think> It is 5.']", "board.live=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all commands, as a reader has it."""
    folder = tmp_path_factory.mktemp("page")
    for name, content in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (folder / name).write_text(content)
    return folder


def test_the_page_has_its_commands(folder: Path) -> None:
    assert len(COMMANDS) == 2
    assert [path.name for path in folder.iterdir()] == ["sums_task.py"]


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers 0.4 is not installed")
@pytest.mark.parametrize("number", [0, 1])
def test_environments_of_the_page(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "verifiers_envs")
    words = shlex.split(COMMANDS[number])
    more = SCRIPTED if words[0] == "eval" else ("sampling.max_tokens=12", "engine.threads=1", "board.live=false")
    with contextlib.chdir(folder):
        assert main([*words, *more]) == 0


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")
def test_without_verifiers_its_absence_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "task=verifiers:tw_sums"]) == 2
    assert "environments of verifiers need it installed" in "".join(capsys.readouterr())

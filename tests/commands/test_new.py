"""`turnwise new`: every choice gives a clean folder that is checked, evaluated and taught as it is."""

import asyncio
import contextlib
import io
import itertools
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.commands.cli import main
from turnwise.commands.new import QUESTIONS
from turnwise.data.task_config import configure
from turnwise.engines.samplers.scripted import Script
from turnwise.rollout.episode import run_episode
from turnwise.rollout.prepare import open_context, prepare
from turnwise.scoring.scorer import apply
from turnwise.system.plugins import load
from turnwise.types import StopReason, Trajectory

ROOT = Path(__file__).parent.parent.parent


def command(*args: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(args))
    return code, out.getvalue(), err.getvalue()


def test_whatever_is_chosen_the_code_is_clean_and_short(tmp_path: Path) -> None:
    choices = [[str(choice) for choice in choices] for _, choices, _ in QUESTIONS.values()]
    for number, (tools, user, reward) in enumerate(itertools.product(*choices)):
        name = str(tmp_path / f"task_{number}")
        code, out, _ = command("new", name, "--tools", tools, "--user", user, "--reward", reward)
        assert code == 0 and f"--tools {tools} --user {user} --reward {reward}" in out
        text = (Path(name) / "task.py").read_text()
        assert len(text.splitlines()) < 150 and ("async def customer" in text) is (user != "none")
    for words in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "flags", [[], ["--tools", "1", "--user", "none", "--reward", "exact"]], ids=["defaults", "least"]
)
def test_a_new_task_passes_its_check_and_runs(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)  # where nobody sits at a terminal, nobody is asked
        code, out, _ = command("new", "support", *flags)
    assert code == 0 and "turnwise check task=support/task.py" in out
    assert command("check", "task=support/task.py")[0] == 0
    code, out, err = command("eval", "task=support/task.py", "eval.samples=4", "engine.threads=1")
    assert code == 0, err
    assert "support" in out


@pytest.mark.parametrize("tools", ["1", "2", "3"])
def test_demonstrations_are_mostly_right(tools: str) -> None:
    """They call what there is, tell what they did and come to an end; about a quarter of them err."""
    assert command("new", "desk", "--tools", tools, "--user", "impatient", "--reward", "two_part")[0] == 0
    config = configure("task=desk/task.py", "chat.check_share=0")
    prepared = prepare(config, "train", limit=60)
    script: Script = load(config.sft.script or "", "script")(config.seed)

    async def play() -> list[Trajectory]:
        async with open_context(prepared, script) as context:
            played = [await run_episode(sample, sibling=0, step=1, context=context) for sample in prepared.samples]
        for trajectory in played:
            await apply(prepared.scoring.scorers["desk"], trajectory)
        return played

    played = asyncio.run(play())
    assert {trajectory.stop_reason for trajectory in played} == {StopReason.USER_ENDED}
    assert not any(record.status.failed for trajectory in played for record in trajectory.calls)
    assert all(trajectory.parts["told"] == 1.0 for trajectory in played)
    assert 0.6 < sum(trajectory.parts["acc"] for trajectory in played) / len(played) < 0.9


def test_nothing_is_overwritten_and_a_name_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    code, _, err = command("new", str(tmp_path / "mine"), "--tools", "1")
    assert code == 2 and "already, and nothing is overwritten" in err and list((tmp_path / "mine").iterdir()) == []
    code, _, err = command("new", "my-task", "--tools", "1")
    assert code == 2 and "a task's name has letters, digits and _" in err
    code, _, err = command("new", "mine", "--user", "pateint")
    assert code == 2 and "patient" in err and not Path("mine").exists()


def test_a_terminal_is_asked_three_questions(tmp_path: Path) -> None:
    outside, inside = pty.openpty()
    os.write(outside, b"4\n1\n\nexact\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "turnwise", "new", "asked"],
        stdin=inside, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False, timeout=60,
    )  # fmt: skip
    os.close(outside)
    os.close(inside)
    assert done.returncode == 0, done.stderr
    assert "'4'" in done.stdout and "--tools 1 --user impatient --reward exact" in done.stdout
    assert (tmp_path / "asked" / "task.py").is_file()

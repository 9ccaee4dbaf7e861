"""`turnwise chat`: piped lines are the user of real episodes; nothing is written unless it is asked for."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.commands.cli import main

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """\
engine:
  name: scripted
  script:
  - "<tool_call>\\n{\\"name\\": \\"find_order\\", \\"arguments\\": {\\"order\\": \\"6635\\"}}\\n</tool_call>"
  - It came late.
  - "#### nothing"
"""


@pytest.fixture
def desk() -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["new", "desk", "--tools", "2", "--user", "impatient", "--reward", "exact"]) == 0
    Path("script.yaml").write_text(SCRIPT)
    return "task=desk/task.py"


def chat(monkeypatch: pytest.MonkeyPatch, typed: str, *args: str) -> tuple[int, str, str]:
    """With these lines on standard input, a real pipe."""
    read, write = os.pipe()
    os.write(write, typed.encode())
    os.close(write)
    out, err = io.StringIO(), io.StringIO()
    with os.fdopen(read) as stdin, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        monkeypatch.setattr(sys, "stdin", stdin)
        code = main(["chat", *args])
    return code, out.getvalue(), err.getvalue()


def test_what_is_typed_is_answered_with_tools_until_it_ends(desk, monkeypatch):
    typed = "Where is order 6635?\nAnd now?\n/help\n/reset\nOnce more, order 6635\n"
    code, out, err = chat(monkeypatch, typed, "--config", "script.yaml", desk)
    assert code == 0, err
    lines = [line.strip() for line in out.splitlines()]
    first = lines.index("you: Where is order 6635?")
    assert lines[first + 1] == '-> find_order {"order": "6635"}'
    assert lines[first + 2].startswith("tool find_order: ") and (
        "in time" in lines[first + 2] or "too late" in lines[first + 2]
    )
    assert lines[first + 3 : first + 6] == ["assistant: It came late.", "you: And now?", "assistant: #### nothing"]
    assert any("there is no '/help'" in line for line in lines)
    assert lines.count('-> find_order {"order": "6635"}') == 2  # the second conversation begins anew
    assert sorted(path.name for path in Path().iterdir()) == ["desk", "script.yaml"]  # nothing was written


def test_a_sample_is_played_by_its_simulated_user_and_scored(desk, monkeypatch):
    code, out, err = chat(
        monkeypatch, "", "--config", "script.yaml", desk, "--sample", "0", "--user", "--out", "said.jsonl"
    )
    assert code == 0, err
    assert "user: Well? I have no time. What will you do?" in out
    assert "the conversation is over: user_ended" in out and "reward: 1" in out  # late, and rightly not refunded
    (line,) = Path("said.jsonl").read_text().splitlines()
    assert "Well? I have no time" in json.dumps(json.loads(line))


def test_the_bundled_model_answers_without_a_task(monkeypatch):
    code, out, err = chat(monkeypatch, "What is 6 times 7?\n/exit\n", "tiny", "task=null", "sampling.max_tokens=12")
    assert code == 0, err
    assert "this is tiny" in out and "assistant: " in out


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["one", "two"], "one run or model at a time"),
        (["tiny", "model.path=other"], "the policy is named twice"),
        (["./nowhere"], "no such folder: ./nowhere"),
        (["task=null", "--user"], "there is no simulated user"),
        (["--sample", "-1"], "--sample -1"),
        (["--out", "there.jsonl"], "nothing is overwritten"),
    ],
)
def test_mistakes_are_one_line(args, problem, monkeypatch):
    Path("there.jsonl").touch()
    code, _, err = chat(monkeypatch, "", *args)
    assert code == 2 and problem in err and len(err.splitlines()) == 1


def test_a_signal_ends_it_at_the_prompt(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a parent may have us ignore it
    )
    start += "from turnwise.commands.cli import main; raise SystemExit(main())"
    words = [sys.executable, "-c", start, "chat", "engine=scripted", "engine.script=[hello]", "task=null"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as running:  # fmt: skip
        assert running.stdout is not None and running.stderr is not None
        text = ""
        while not text.endswith("you: "):  # it waits for a line that never comes
            text += running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        assert running.wait(300) == 128 + signal.SIGINT
        assert running.stderr.read() == "turnwise chat: stopped by SIGINT\n"
    assert list(tmp_path.iterdir()) == []

"""Agents that are programs of their own: their calls are recorded, and nothing of them outlives the episode."""

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from turnwise.errors import ConfigError
from turnwise.types import StopReason

EXAMPLE = Path(__file__).parents[3] / "examples" / "openai_agent" / "program.py"
CALL = """
import json, os, sys, urllib.request
assert set(json.load(sys.stdin)) == {"id", "data_source", "prompt", "info"}
body = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
headers = {"Content-Type": "application/json"}
urllib.request.urlopen(
    urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
).read()
"""
CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1], "w") as file:
    file.write(str(child.pid))
"""


def command(tmp_path, text, *arguments):
    path = tmp_path / "agent.py"
    path.write_text(text)
    return f"exec:{shlex.join([sys.executable, str(path), *map(str, arguments)])}"


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    try:
        with open(f"/proc/{process}/stat") as file:  # one that is dead and not yet reaped by its new parent
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(process):
    deadline = time.monotonic() + 30
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    alive = is_running(process)
    if alive:
        os.kill(process, signal.SIGKILL)
    return not alive


def test_a_program_with_the_openai_sdk_is_recorded(rollouts, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a key for somebody else")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    rollout = rollouts.make(["It is 42.", "Quite."], client=f"exec:{shlex.join([sys.executable, str(EXAMPLE)])}")
    found = rollout.play()
    assert found.failure is None and found.stop_reason is StopReason.ANSWERED
    rollout.check_tokens(found)
    assert len(found.turns) == 2 and not found.branches
    assert found.artifacts["client_result"] == "Quite."


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        ("print('fine')", None),
        ("sys.exit(75)", "exit status 75: it said nothing"),
        ("raise ConnectionRefusedError('the shop is closed')", "ConnectionRefusedError: the shop is closed"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("print('x' * 2000000)", "printed more than"),
    ],
)
def test_what_it_started_is_gone_with_it(rollouts, tmp_path, end, failure):
    path = tmp_path / "child"
    found = rollouts.make(["ok"], client=command(tmp_path, f"{CALL}{CHILD}{end}\n", path)).play()
    assert wait_until_gone(int(path.read_text()))
    if failure is None:
        assert found.failure is None and found.artifacts["client_result"] == "fine"
    else:
        assert found.stop_reason is StopReason.FAILED and failure in found.failure


@pytest.mark.parametrize("end", ["sys.exit('lost its way')", "raise ValueError('lost its way')"])
def test_one_that_gives_up_over_the_policys_words_has_played(rollouts, tmp_path, end):
    found = rollouts.make(["ok"], client=command(tmp_path, f"{CALL}{end}\n", tmp_path / "child")).play()
    assert found.stop_reason is StopReason.AGENT_ERROR and found.failure is None
    assert "exit status 1: " in found.facts.agent_error and "lost its way" in found.facts.agent_error


def test_one_that_gives_up_before_the_policy_spoke_has_failed(rollouts, tmp_path):
    found = rollouts.make(["ok"], client=command(tmp_path, "import sys\nsys.exit('no')\n", tmp_path / "child")).play()
    assert found.stop_reason is StopReason.FAILED and "exit status 1: no" in found.failure


def test_it_gets_the_variables_that_are_named_and_no_secret(rollouts, tmp_path, monkeypatch):
    secrets = ("HF_TOKEN", "WANDB_API_KEY", "TURNWISE_SANDBOX_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
    for name in (*secrets, "SEARCH_KEY", "LC_TIME"):
        monkeypatch.setenv(name, f"mine-{name}")
    client = command(tmp_path, f"{CALL}print(json.dumps(dict(os.environ)))")
    found = rollouts.make(["ok"], client=client, client_env=["SEARCH_KEY"]).play()
    given = json.loads(found.artifacts["client_result"])
    assert given["SEARCH_KEY"] == "mine-SEARCH_KEY" and given["LC_TIME"] == "mine-LC_TIME" and "PATH" in given
    assert not any(f"mine-{name}" in value for name in secrets for value in given.values())
    assert given["OPENAI_API_KEY"] == "turnwise" and "127.0.0.1" in given["NO_PROXY"]
    with pytest.raises(ConfigError, match=r"sdk_agents.client_env: the environment variable NO_SUCH_KEY is not set"):
        rollouts.make(["ok"], client=client, client_env=["NO_SUCH_KEY"])


def test_one_that_never_ends_is_killed_when_its_time_is_up(rollouts, tmp_path):
    path = tmp_path / "child"
    text = f"{CALL}{CHILD}while True: time.sleep(1)\n"
    rollout = rollouts.make(["ok"], client=command(tmp_path, text, path), max_seconds=2.0)
    found = rollout.play()
    assert found.stop_reason is StopReason.TIME_BUDGET
    if path.exists():  # not when the machine was too slow for it to begin
        assert wait_until_gone(int(path.read_text()))

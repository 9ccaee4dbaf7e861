"""`turnwise board` as a person calls it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from turnwise.commands.cli import main
from turnwise.storage.run_dir import RunDir

ROOT = Path(__file__).parents[3]
TOKEN_ENV = "TURNWISE_BOARD_TOKEN"
# A script that starts a job in the background has SIGINT ignored in it; an interrupted board was started in a terminal.
IN_A_TERMINAL = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from turnwise.commands.cli import main; raise SystemExit(main())"
)
HEAVY = {"torch", "transformers", "pandas", "matplotlib", "plotly"}


def a_run(folder):
    RunDir.create(folder, "first", "train").write_text("config.yaml", "task: arithmetic\n")
    return folder


def board(*arguments, cwd, token=None):
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_ENV}
    if token is not None:
        environment[TOKEN_ENV] = token
    paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT)])
    command = [sys.executable, "-c", IN_A_TERMINAL, "board", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def address(process):
    return process.stdout.readline().removeprefix("board: ").strip()


def get(url, **headers):
    return httpx.get(f"{url}api/runs", headers=headers, timeout=60, trust_env=False)


def test_it_prints_its_address_and_serves_the_runs_here_until_interrupted(tmp_path):
    a_run(tmp_path / "runs")
    process = board("--port", 0, cwd=tmp_path)
    try:
        url = address(process)
        assert url.startswith("http://127.0.0.1:")
        assert [run["name"] for run in get(url).json()["runs"]] == ["first"]
        assert get(url, Host="evil.example").status_code == 400
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err


def test_the_token_comes_from_the_environment_and_is_not_printed(tmp_path):
    process = board(a_run(tmp_path), "--port", 0, "--host", "0.0.0.0", cwd=tmp_path, token="s3cret")
    try:
        url, hint = address(process), process.stdout.readline()
        assert TOKEN_ENV in hint and "s3cret" not in url + hint
        assert get(url).status_code == 401
        assert get(url, Authorization="Bearer s3cret").status_code == 200
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.fixture
def refused(monkeypatch, capsys):
    """What the command says when it does not start."""

    def ask(*arguments, token=None):
        if token is None:
            monkeypatch.delenv(TOKEN_ENV, raising=False)
        else:
            monkeypatch.setenv(TOKEN_ENV, token)
        assert main(["board", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return ask


def test_elsewhere_than_on_this_machine_it_needs_a_token(tmp_path, refused):
    assert "token" in refused(a_run(tmp_path), "--host", "0.0.0.0")
    assert "token" in refused(tmp_path, "--host", "0.0.0.0", token="")


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no folder 'runs'" in refused()
    assert "no folder 'elsewhere'" in refused("elsewhere")


def test_a_taken_port_is_named_with_the_option_that_changes_it(tmp_path, refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(a_run(tmp_path), "--port", port)
    assert str(port) in said and "--port" in said
    assert "65535" in refused(tmp_path, "--port", 70000)


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1"])
def test_a_host_that_cannot_be_bound_is_a_clear_error(tmp_path, refused, host):
    assert "cannot listen" in refused(a_run(tmp_path), "--host", host, token="s3cret")


def test_without_plotly_it_says_what_to_install(tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert 'pip install "turnwise[board]"' in refused(a_run(tmp_path))


def test_starting_imports_nothing_heavy():
    code = "import sys, turnwise.ext.board.command, turnwise.ext.board.serve; sys.stdout.write(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.split(".")[0] for name in loaded} & HEAVY == set()
    assert "numpy" not in loaded and "pyarrow" not in loaded  # these wait until a run is opened

"""A board beside a training starts, tells where it is, and ends with its parent, however that ends."""

import os
import signal
import socket
import subprocess
import sys
import time

import httpx

from turnwise.ext.board.board_process import start_board
from turnwise.storage.run_dir import RunDir

PARENT = """
import sys, time
from pathlib import Path
from turnwise.ext.board.board_process import start_board
board = start_board(Path(sys.argv[1]), 0)
print(board.url, flush=True)
time.sleep(600)
"""


def a_run(folder):
    RunDir.create(folder, "first", "train").write_text("config.yaml", "task: arithmetic\n")
    return folder


def names(url):
    return [run["name"] for run in httpx.get(f"{url}api/runs", timeout=60, trust_env=False).json()["runs"]]


def ends(url, seconds=30):
    """Whether nobody listens there any more, sooner or later."""
    port = int(url.rstrip("/").rpartition(":")[2])
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)):
                return True
        time.sleep(0.05)
    return False


def test_it_shows_the_runs_until_it_is_closed(tmp_path):
    with start_board(a_run(tmp_path), 0) as board:
        assert board.url is not None and board.url in board.note
        assert names(board.url) == ["first"]
    assert ends(board.url)


def test_a_taken_port_is_no_obstacle(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start_board(a_run(tmp_path), port) as board:
            assert board.url is not None and f":{port}/" not in board.url
            assert names(board.url) == ["first"]


def test_it_ends_when_its_parent_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(a_run(tmp_path))], stdout=subprocess.PIPE, text=True)
    try:
        url = parent.stdout.readline().strip()
        assert names(url) == ["first"]
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate()
    assert ends(url)


def test_a_board_that_cannot_start_is_a_note(tmp_path):
    board = start_board(tmp_path / "nowhere", 0)
    assert board.url is None and "could not start" in board.note and "nowhere" in board.note
    board.close()


def test_a_board_that_takes_too_long_is_a_note(tmp_path):
    board = start_board(a_run(tmp_path), 0, start_seconds=0.0)
    assert board.url is None and "could not start" in board.note

"""One writer per folder: the second is refused by name, a dead one does not count, and nothing is left behind."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.errors import StorageError
from turnwise.storage.lock import Holder, holding

ROOT = Path(__file__).parent.parent.parent
HOLD = (
    "import sys, pathlib; from turnwise.storage.lock import holding\n"
    "with holding(pathlib.Path(sys.argv[1]), 'train', print):\n"
    "    print('held', flush=True); sys.stdin.read()\n"
)


def quiet(text: str) -> None:
    raise AssertionError(text)


def holder(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    process = holder(tmp_path / "run")
    try:
        with pytest.raises(StorageError) as caught:
            with holding(tmp_path / "run", "eval", quiet):
                raise AssertionError("it was let in")
        for part in (f"process {process.pid} on {socket.gethostname()}", "turnwise train", "since 2"):
            assert part in str(caught.value)
    finally:
        process.communicate("")
    with holding(tmp_path / "run", "eval", quiet):
        assert (tmp_path / "run" / ".lock").is_file()


def test_a_killed_process_does_not_count(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.kill()
    process.communicate()
    assert (tmp_path / ".lock").is_file(), "it could not tidy up"
    with holding(tmp_path, "train", quiet):
        assert Holder.model_validate_json((tmp_path / ".lock").read_text()).pid == os.getpid()
    assert not (tmp_path / ".lock").exists()


def test_one_process_does_not_hold_a_folder_twice(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with holding(tmp_path, "train", quiet):
        with pytest.raises(StorageError, match=f"written by process {os.getpid()} on "):
            with holding(tmp_path, "train", quiet):
                raise AssertionError("it was let in")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_folder_that_was_made_and_stays_empty_is_removed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"):
        with holding(tmp_path / "a" / "b", "sft", quiet):
            raise ValueError("mine")
    assert not (tmp_path / "a" / "b").exists()


@pytest.mark.parametrize("content", ["", "{", '{"pid": "x"}', "\x00"])
def test_a_holder_that_has_not_said_its_name_is_refused_all_the_same(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="is being written by another process"):
            with holding(tmp_path, "train", quiet):
                raise AssertionError("it was let in")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("all I have")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="cannot lock"):
        with holding(tmp_path, "train", quiet):
            raise AssertionError("it was let in")
    assert (tmp_path / "precious").read_text() == "all I have"


@pytest.mark.parametrize(
    ("host", "alive", "refused"), [("here", True, True), ("here", False, False), ("elsewhere", False, True)]
)
def test_without_locks_the_file_is_all_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, alive: bool, refused: bool
) -> None:
    """No file system without locks is at hand: the system call answers as it does on one."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    gone = subprocess.Popen(["true"])
    gone.wait()
    pid = os.getppid() if alive else gone.pid
    last = Holder(pid=pid, host=socket.gethostname() if host == "here" else host, command="train", since=1.8e9)
    (tmp_path / ".lock").write_text(last.model_dump_json())
    said: list[str] = []
    if refused:
        with pytest.raises(StorageError, match=rf"process {pid} on .*if that process has ended, remove .*\.lock"):
            with holding(tmp_path, "train", said.append):
                raise AssertionError("it was let in")
        return
    with holding(tmp_path, "train", said.append):
        assert len(said) == 1 and "without locks (No locks available)" in said[0]

"""status.json: what a run says about itself, at every end it can come to."""

import asyncio
import os
import socket

import pytest

from turnwise.errors import StorageError, TurnwiseError
from turnwise.storage.run_dir import RunDir
from turnwise.storage.status import State, StatusWriter, read_status


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "a", "train")


def test_a_run_that_never_said_anything_has_no_status(run):
    assert read_status(run) is None


def test_it_tells_where_it_is_and_how_it_ended(run):
    with StatusWriter(run, "train", steps=4) as status:
        begun = read_status(run)
        assert begun and (begun.state, begun.step, begun.steps) == (State.RUNNING, 0, 4)
        assert (begun.pid, begun.host) == (os.getpid(), socket.gethostname())
        status.at(3)
        now = read_status(run)
        assert now and now.step == 3 and now.updated >= begun.updated
        status.end, status.reason = State.STOPPED, "stopped by a signal"
    ended = read_status(run)
    assert ended and (ended.state, ended.reason, ended.step) == (State.STOPPED, "stopped by a signal", 3)
    assert ended.started == begun.started


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (TurnwiseError("the disk is full"), State.FAILED, "the disk is full"),
        (ValueError(), State.FAILED, "ValueError"),
        (KeyboardInterrupt(), State.STOPPED, "interrupted"),
        (asyncio.CancelledError(), State.STOPPED, "interrupted"),
    ],
)
def test_an_error_is_told_and_goes_on(run, error, state, reason):
    with pytest.raises(type(error)):
        with StatusWriter(run, "eval"):
            raise error
    found = read_status(run)
    assert found and (found.state, found.reason) == (state, reason)


def test_the_error_is_the_news_also_when_nothing_can_be_written(run):
    with pytest.raises(ValueError, match="first"):
        with StatusWriter(run, "eval"):
            (run.path / "status.json").unlink()
            (run.path / "status.json").mkdir()
            raise ValueError("first")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "asleep"}', '{"state": "failed", "extra": 1}', "null"])
def test_a_damaged_file_is_named(run, text):
    (run.path / "status.json").write_text(text)
    with pytest.raises(StorageError, match="status.json is damaged"):
        read_status(run)

"""Episodes that no file has yet are shown while the run goes on, and nothing about it can stop or slow the run."""

import asyncio
import json

import pytest

from turnwise.storage.recorder import Recorder
from turnwise.storage.run_dir import UNDERWAY, RunDir
from turnwise.storage.underway import LONGEST, MOST, MOST_MESSAGES, EpisodesUnderWay, UnderwayWriter, playing, shown
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn

SAMPLE = Sample("a", (Message(Role.USER, "6*7?"),), "sums")


def ended(messages):
    turn = Turn(0, Message(Role.ASSISTANT, "x"), FinishReason.STOP, 0, 1, 1)
    return Trajectory(SAMPLE, 0, 0, messages, [turn], [], StopReason.ANSWERED, 0.1)


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "a", "train")


def test_an_episode_shows_what_was_said_by_now_and_then_how_it_ended():
    episodes, messages = EpisodesUnderWay(), [*SAMPLE.prompt]
    with episodes.playing(SAMPLE, 2, -1, messages) as result:
        messages.append(Message(Role.ASSISTANT, "y" * (LONGEST + 1)))
        seen = shown(episodes.now())
        assert (seen["playing"], seen["finished"]) == (1, 0)
        (one,) = seen["episodes"]
        assert (one["sample_id"], one["sibling"], one["evaluation"]) == ("a", 2, True) and "reward" not in one
        assert [message["role"] for message in one["messages"]] == ["user", "assistant"]
        assert one["messages"][1]["text"].endswith(f"… ({LONGEST + 1} characters)")
        trajectory = ended(messages)
        result.append(trajectory)
    trajectory.reward = 1.0  # scored later
    seen = shown(episodes.now())
    assert (seen["playing"], seen["finished"]) == (0, 1) and seen["episodes"][0]["reward"] == 1.0
    episodes.recorded([ended([])])
    assert shown(episodes.now())["finished"] == 1, "another one was recorded"
    episodes.recorded([trajectory])
    assert episodes.now() == []


def test_what_is_broken_off_or_dropped_is_gone():
    episodes = EpisodesUnderWay()
    with pytest.raises(RuntimeError), episodes.playing(SAMPLE, 0, 0, []):
        raise RuntimeError
    with episodes.playing(SAMPLE, 0, 0, []) as result:
        result.append(ended([]))
    assert len(episodes.now()) == 1
    result.clear()
    assert episodes.now() == [], "nobody holds a trajectory that was left out"


def test_only_so_much_is_shown():
    episodes, kept = EpisodesUnderWay(), []
    for _ in range(2 * MOST):
        with episodes.playing(SAMPLE, 0, 0, []) as result:
            result.append(ended([Message(Role.USER, "z")] * (MOST_MESSAGES + 3)))
        kept += result
    seen = shown(episodes.now())
    assert seen["finished"] == 2 * MOST and len(seen["episodes"]) == MOST
    assert seen["episodes"][0]["before"] == 3 and len(seen["episodes"][0]["messages"]) == MOST_MESSAGES


def test_the_file_is_replaced_when_something_is_new_and_gone_with_the_run(run):
    (run.path / UNDERWAY).write_text("{}")
    with UnderwayWriter(run) as episodes:
        assert not (run.path / UNDERWAY).exists(), "that of a process before"
        writer = UnderwayWriter(run)
        writer.episodes = episodes
        with playing(SAMPLE, 0, 0, list(SAMPLE.prompt)):
            content = writer._write("")
            assert json.loads((run.path / UNDERWAY).read_text())["playing"] == 1
            (run.path / UNDERWAY).unlink()
            assert writer._write(content) == content and not (run.path / UNDERWAY).exists()
            writer._write("")
    assert not (run.path / UNDERWAY).exists()
    with playing(SAMPLE, 0, 0, []) as result:  # outside of a run nobody looks on
        result.append(ended([]))


def test_a_place_that_takes_no_file_ends_the_looking_on_and_not_the_run(run):
    (run.path / f".{UNDERWAY}.tmp").mkdir()
    UnderwayWriter(run, seconds=0.0)._look_on()
    assert "the episodes under way are not shown any more: cannot write" in run.log_path.read_text()


def test_what_the_recorder_has_written_is_not_under_way(run):
    with Recorder(run) as recorder:
        with playing(SAMPLE, 0, 0, []) as result:
            result.append(ended([]))
        episodes = recorder._underway.episodes
        assert len(episodes.now()) == 1
        asyncio.run(recorder.record("trajectories/step_000001.parquet", result))
        assert episodes.now() == []

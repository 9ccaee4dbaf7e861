"""The board reads the episodes under way from the run's file, whoever wrote it."""

import time

import pytest

from turnwise.errors import StorageError
from turnwise.ext.board.runs import Runs
from turnwise.ext.board.underway import NOTHING, underway
from turnwise.storage.run_dir import UNDERWAY
from turnwise.storage.underway import EpisodesUnderWay, shown


def test_they_are_counted_on_every_page_and_gone_with_the_file(run_dir, make):
    episode = make("s0")
    episodes = EpisodesUnderWay()
    run = Runs([run_dir.path]).open("first")
    assert underway(run_dir) == NOTHING and run.details(time.time())["underway"] == {"playing": 0, "finished": 0}
    with episodes.playing(episode.sample, 0, 1, episode.messages):
        run_dir.write_json(UNDERWAY, shown(episodes.now()))
    assert run.details(time.time())["underway"] == {"playing": 1, "finished": 0}
    (one,) = underway(run_dir)["episodes"]
    assert [message["calls"] for message in one["messages"] if message["role"] == "assistant"] == [["python"], []]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"playing": 1, "finished": 0, "episodes": [{"sample_id": 3, "messages": []}]}']
)
def test_a_damaged_file_is_told_and_the_run_is_shown(run_dir, content):
    run_dir.write_text(UNDERWAY, content)
    with pytest.raises(StorageError, match="underway.json is damaged"):
        underway(run_dir)
    details = Runs([run_dir.path]).open("first").details(time.time())
    assert "underway.json is damaged" in details["problems"][0] and details["underway"]["playing"] == 0

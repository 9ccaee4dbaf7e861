"""A group's page: siblings side by side with their numbers."""

import json

import pytest

from turnwise.ext.board.groups import group
from turnwise.ext.board.table import NotThere, Table
from turnwise.storage.index import record

FILE, SHARD = "trajectories/step_000001.parquet", "trajectories/step_000001"


def page(run, rows, sample="a"):
    record(run, FILE, rows)
    table = Table(run)
    table.refresh(None)
    found = group(run, table, SHARD, sample)
    json.dumps(found, allow_nan=False)
    return found


def test_siblings_with_their_words_and_numbers(run_dir, make):
    rows = [
        make("a", reward=1.0, sibling=0, advantage=0.5),
        make("b", reward=0.0),
        make("a", reward=0.0, sibling=1, advantage=-0.5, answer="41"),
        make("a", reward=0.0, sibling=2),
        make("a", reward=None, sibling=3, failure="lost"),
    ]
    found = page(run_dir, rows)
    assert [sibling["row"] for sibling in found["siblings"]] == [0, 2, 3, 4]
    assert [sibling["advantage"] for sibling in found["siblings"]] == [0.5, -0.5, None, None]
    assert [message["role"] for message in found["siblings"][1]["messages"]] == ["assistant", "tool", "assistant"]
    assert found["siblings"][1]["messages"][-1]["text"] == "41"
    assert found["question"] == "What is 6 times 7?" and found["ground_truth"] == "42" and found["size"] == 4
    assert found["data_source"] == "arithmetic" and found["sample_id"] == "a"
    assert found["mean"] == pytest.approx(1 / 3) and found["std"] == pytest.approx((2 / 9) ** 0.5)
    assert found["zero_variance"] is False
    assert found["pass_at_k"] == {"1": pytest.approx(1 / 3), "2": pytest.approx(2 / 3)}


def test_all_equal_is_zero_variance_and_one_alone_is_not(run_dir, make):
    found = page(run_dir, [make("a", reward=0.1), make("a", reward=0.1), make("c"), make("n", reward=None)])
    assert found["zero_variance"] is True and found["std"] == 0.0
    table = Table(run_dir)
    table.refresh(None)
    assert group(run_dir, table, SHARD, "c")["zero_variance"] is False
    alone = group(run_dir, table, SHARD, "n")
    assert (alone["mean"], alone["std"], alone["pass_at_k"], alone["zero_variance"]) == (None, None, {}, False)
    for shard, sample in ((SHARD, "x"), ("trajectories/step_000009", "a")):
        with pytest.raises(NotThere):
            group(run_dir, table, shard, sample)

"""Full-text search finds every message once, whatever slices it comes in."""

import json

import pytest

from turnwise.ext.board.filters import BadFilter
from turnwise.ext.board.search import MOST_HITS, excerpt, search
from turnwise.ext.board.table import Table
from turnwise.storage.index import record
from turnwise.types import Image, Message, Role, Text


def full(run):
    table = Table(run)
    table.refresh(None)
    return table


def through(run, table, **asked):
    """All hits, one file at a time."""
    hits, cursor, rounds = [], None, 0
    while True:
        found = search(run, table, cursor=cursor, seconds=0.0, **asked)
        json.dumps(found, allow_nan=False)
        hits += [(hit["shard"].rpartition("_")[2], hit["row"]) for hit in found["hits"]]
        rounds, cursor = rounds + 1, found["cursor"]
        assert rounds < 100
        if cursor is None:
            assert found["searched"] == found["of"]
            return hits, rounds


@pytest.fixture
def table(run_dir, make):
    for step in (1, 2, 3):
        rows = [make(f"s{n}", step=step, reply=f"needle {n}" if n % 2 else "hay", reward=float(n)) for n in range(4)]
        record(run_dir, f"trajectories/step_{step:06d}.parquet", rows)
    record(run_dir, "eval/step_000003.parquet", [make("e", answer="a NEEDLE, too")])
    return full(run_dir)


def test_all_messages_are_searched_newest_first_in_slices(run_dir, table):
    hits, rounds = through(run_dir, table, text="Needle")
    assert hits == [
        ("000003", 0),
        ("000003", 1),
        ("000003", 3),
        ("000002", 1),
        ("000002", 3),
        ("000001", 1),
        ("000001", 3),
    ]
    assert rounds == 4
    once = search(run_dir, table, text="Needle", seconds=60)
    assert len(once["hits"]) == 7 and once["cursor"] is None
    assert once["hits"][1]["excerpt"] == "needle 1" and once["hits"][1]["entry"]["sample_id"] == "s1"


def test_filter_and_split_leave_files_out(run_dir, table):
    assert through(run_dir, table, text="needle", split="eval") == ([("000003", 0)], 1)
    assert through(run_dir, table, text="needle", filter="reward > 2") == ([(f"00000{n}", 3) for n in (3, 2, 1)], 3)
    none = search(run_dir, table, text="needle", filter="step > 99")
    assert (none["hits"], none["of"], none["cursor"]) == ([], 0, None)


def test_many_hits_come_in_portions(run_dir, make):
    record(run_dir, "trajectories/step_000001.parquet", [make(f"s{n}", calls=[]) for n in range(MOST_HITS + 30)])
    table = full(run_dir)
    first = search(run_dir, table, text="42", seconds=60)
    assert len(first["hits"]) == MOST_HITS and first["searched"] == 0
    second = search(run_dir, table, text="42", cursor=first["cursor"], seconds=60)
    rows = [hit["row"] for hit in first["hits"] + second["hits"]]
    assert rows == list(range(MOST_HITS + 30)) and second["cursor"] is None


def test_a_search_goes_on_while_the_run_does(run_dir, make, table):
    first = search(run_dir, table, text="needle", split="train", seconds=0.0)
    record(run_dir, "trajectories/step_000009.parquet", [make(reply="needle")])
    table.refresh()
    second = search(run_dir, table, text="needle", split="train", cursor=first["cursor"], seconds=60)
    assert [hit["shard"] for hit in second["hits"]] == ["trajectories/step_000002"] * 2 + [
        "trajectories/step_000001"
    ] * 2


def test_texts_in_parts_are_found_and_inline_images_are_not_text(run_dir, make):
    told = make(calls=[])
    told.messages.append(Message(Role.USER, (Text("in a part"), Image("data:image/png;base64,partpart"))))
    record(run_dir, "trajectories/step_000001.parquet", [told])
    table = full(run_dir)
    assert search(run_dir, table, text="IN A PART")["hits"][0]["excerpt"] == "in a part"
    assert search(run_dir, table, text="partpart")["hits"] == []


def test_a_damaged_file_is_named_and_the_rest_searched(run_dir, table):
    (run_dir.path / "trajectories/step_000002.parquet").write_bytes(b"PAR1")
    found = search(run_dir, table, text="needle", split="train", seconds=60)
    assert len(found["hits"]) == 4 and [entry["file"] for entry in found["damaged"]] == [
        "trajectories/step_000002.parquet"
    ]


@pytest.mark.parametrize(
    "asked",
    [
        {"text": "  "},
        {"text": "x" * 501},
        {"text": "a", "cursor": "../../etc/passwd@0"},
        {"text": "a", "cursor": "trajectories/step_000001@-1"},
        {"text": "a", "cursor": "trajectories/step_000001"},
        {"text": "a", "cursor": "trajectories/step_000001@" + "9" * 50},
        {"text": "a", "filter": "nonsense"},
        {"text": "a", "split": "nonsense"},
    ],
)
def test_what_makes_no_sense_is_said(run_dir, table, asked):
    with pytest.raises(BadFilter):
        search(run_dir, table, **asked)


def test_excerpts_are_short_and_around_the_hit():
    long = "x" * 500 + " the Needle is here " + "y" * 500
    cut = excerpt(long, "needle")
    assert cut.startswith("…x") and cut.endswith("y…") and "the Needle is here" in cut and len(cut) < 200
    assert excerpt("a (b", "(B") == "a (b"
    assert excerpt("İstanbul ist schön", "schön") == "İstanbul ist schön"

"""The table follows the run directory, and its pages are right."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from turnwise.ext.board.filters import BadFilter
from turnwise.ext.board.table import NotThere, ShardInfo, Table, listing
from turnwise.storage.index import COLUMNS, INDEX, record
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import write_trajectories
from turnwise.types import StopReason


def train(step: int) -> str:
    return f"trajectories/step_{step:06d}.parquet"


def full(run: RunDir) -> Table:
    table = Table(run)
    table.refresh(None)
    return table


def test_shards_rows_and_entries_come_from_the_index(run_dir, make):
    record(run_dir, train(2), [make("a", step=2), make("b", step=2, reward=None)])
    record(run_dir, "eval/step_000002.parquet", [make("c", step=-3, first_right=True)])
    record(run_dir, "eval/greedy_step_000002.parquet", [make("c", step=-3)])
    table = full(run_dir)
    assert table.shards() == [
        ShardInfo("eval/greedy_step_000002", "greedy", 2, 1),
        ShardInfo("eval/step_000002", "eval", 2, 1),
        ShardInfo("trajectories/step_000002", "train", 2, 2),
    ]
    entry = table.entry("trajectories/step_000002", 1)
    assert (entry["sample_id"], entry["reward"], entry["right"], entry["parts"]) == ("b", None, None, {})
    assert set(entry) == {*COLUMNS, "shard", "row"}
    first = table.entry("eval/step_000002", 0)
    assert first["step"] == 2, "an evaluation's round number is not a step"
    assert first["first_right"] is True and first["tools"] == ["python"] and first["failure"] is None
    json.dumps(listing(table), allow_nan=False)


def test_refresh_says_whether_anything_changed_and_reads_only_what_is_new(run_dir, make):
    table = Table(run_dir)
    assert table.refresh() is False
    record(run_dir, train(1), [make()])
    assert table.refresh() is True and table.size == 1
    assert table.refresh() is False
    record(run_dir, train(2), [make(), make()])
    assert table.refresh() is True and table.size == 3


def test_a_half_written_line_is_left_for_later(run_dir, make):
    record(run_dir, train(1), [make("a")])
    record(run_dir, train(2), [make("b")])
    index = run_dir.path / INDEX
    whole = index.read_bytes()
    index.write_bytes(whole[:-40])
    for file in (train(1), train(2)):
        os.unlink(run_dir.path / file)  # only the index can tell
    table = Table(run_dir)
    table.refresh()
    assert [info.step for info in table.shards()] == [1] and table.damaged == []
    with index.open("ab") as file:
        file.write(whole[-40:])
    assert table.refresh() and [info.step for info in table.shards()] == [1, 2]


def test_the_last_line_about_a_file_wins_whenever_it_is_read(run_dir, make):
    record(run_dir, train(1), [make("old"), make("old")])
    early = full(run_dir)
    record(run_dir, train(2), [make("other", parts={"format": 0.5})])
    record(run_dir, train(1), [make("new", parts={"acc": 0.0, "style": 2.0})])
    early.refresh()
    for table in (early, full(run_dir)):
        assert table.column("sample_id").tolist() == ["new", "other"]
        assert [row["parts"] for row in listing(table)["rows"]] == [{"format": 0.5}, {"acc": 0.0, "style": 2.0}]
        np.testing.assert_array_equal(table.column("parts.style"), [2.0, np.nan])


@pytest.mark.parametrize("way", ["shrunk", "replaced", "rewritten in place"])
def test_another_index_is_read_anew(run_dir, make, tmp_path, way):
    for step in (1, 2, 3):
        record(run_dir, train(step), [make(f"s{step}", step=step)])
    table = full(run_dir)
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    for step in (1, 2, 3, 4) if way != "shrunk" else (1,):
        record(other, train(step), [make(f"t{step}", step=step)])
    for path in run_dir.path.glob("trajectories/*"):
        path.unlink()
    content = (other.path / INDEX).read_bytes()
    if way == "replaced":
        os.replace(other.path / INDEX, run_dir.path / INDEX)
    else:
        (run_dir.path / INDEX).write_bytes(content)
    assert table.refresh()
    assert table.column("sample_id").tolist() == (["t1"] if way == "shrunk" else ["t1", "t2", "t3", "t4"])


def test_files_without_a_line_are_read_themselves_newest_first_in_slices(run_dir, make):
    for step in range(5):
        write_trajectories(run_dir.file(train(step)), [make(f"s{step}", step=step)])
    table = Table(run_dir)
    table.refresh(0.0)  # at least one
    assert [info.step for info in table.shards()] == [4] and listing(table)["pending"] == 4
    assert table.entry("trajectories/step_000001", 0)["sample_id"] == "s1", "a link into the rest opens at once"
    table.refresh(None)
    assert [info.step for info in table.shards()] == [0, 1, 2, 3, 4] and listing(table)["pending"] == 0


def test_a_file_whose_line_is_on_its_way_is_not_read_twice(run_dir, make, monkeypatch):
    monkeypatch.setattr("turnwise.ext.board.feed.SETTLING", 3600)
    record(run_dir, train(1), [make()])
    write_trajectories(run_dir.file(train(2)), [make()])
    table = Table(run_dir)
    table.refresh(None)
    assert [info.step for info in table.shards()] == [1] and table.pending == 1
    past = time.time() - 7200
    os.utime(run_dir.path / train(2), (past, past))
    os.utime(run_dir.path / "trajectories", (past, past))
    table.refresh(None)
    assert [info.step for info in table.shards()] == [1, 2] and table.pending == 0


def test_damaged_files_and_lines_are_listed_and_the_rest_is_shown(run_dir, make):
    record(run_dir, train(1), [make()])
    good = json.loads((run_dir.path / INDEX).read_text())
    past = time.time() - 60
    (run_dir.path / train(7)).write_bytes(b"PAR1 nonsense")
    os.utime(run_dir.path / train(7), (past, past))
    wrong_type = {**good, "file": train(8), "columns": {**good["columns"], "reward": ["much"]}}
    outside = {**good, "file": "../../etc/passwd.parquet"}
    short = {**good, "file": train(9), "columns": {**good["columns"], "reward": []}}
    with (run_dir.path / INDEX).open("a") as file:
        for line in (wrong_type, outside, short):
            file.write(json.dumps(line) + "\n")
        file.write("{not json}\n\n")
    table = full(run_dir)
    assert [info.step for info in table.shards()] == [1]
    damaged = listing(table)["damaged"]
    assert sorted(entry["file"] for entry in damaged) == sorted(
        [train(7), train(8), "../../etc/passwd.parquet", INDEX, INDEX]
    )
    assert all(entry["reason"] for entry in damaged)
    write_trajectories(run_dir.path / train(7), [make()])
    os.utime(run_dir.path / train(7), (past, past + 1))
    table.refresh(None)
    assert [info.step for info in table.shards()] == [1, 7], "a file that was mended is read again"


def test_a_line_that_makes_no_sense_does_not_hide_its_file(run_dir, make):
    record(run_dir, train(1), [make("a")])
    line = json.loads((run_dir.path / INDEX).read_text())
    line["columns"]["turns"] = [10**30]
    (run_dir.path / INDEX).write_text(json.dumps(line) + "\n")
    table = full(run_dir)
    table.refresh(None)
    assert table.column("sample_id").tolist() == ["a"] and table.column("turns").tolist() == [2]


def test_only_known_shards_and_rows_are_opened(run_dir, make, tmp_path):
    record(run_dir, train(1), [make()])
    table = full(run_dir)
    assert table.path("trajectories/step_000001") == run_dir.path / train(1)
    for shard in ("trajectories/step_000002", "../first/trajectories/step_000001", "/etc/passwd", "", "trajectories/"):
        with pytest.raises(NotThere):
            table.path(shard)
    for row in (-1, 1, 10**9):
        with pytest.raises(NotThere, match="holds 1"):
            table.entry("trajectories/step_000001", row)
    outside = tmp_path / "outside.parquet"
    os.replace(run_dir.path / train(1), outside)
    (run_dir.path / train(1)).symlink_to(outside)
    with pytest.raises(NotThere, match="outside"):
        table.path("trajectories/step_000001")


def test_a_link_to_a_file_outside_is_not_taken_in(run_dir, make, tmp_path):
    outside = tmp_path / "outside.parquet"
    write_trajectories(outside, [make()])
    (run_dir.path / "trajectories").mkdir()
    (run_dir.path / train(3)).symlink_to(outside)
    assert full(run_dir).shards() == []


def test_columns_have_plain_types(run_dir, make):
    done = make("a", parts={"acc": 1.0}, advantage=0.5)
    failed = make("b", reward=None, failure="lost", stop=StopReason.FAILED, calls=[])
    record(run_dir, train(1), [done, failed])
    record(run_dir, "eval/step_000001.parquet", [make("c", parts={"acc": 0.0, "format": 1.0})])
    table = full(run_dir)
    assert [info.split for info in table.shards()] == ["eval", "train"]
    np.testing.assert_array_equal(table.column("reward"), [1.0, 1.0, np.nan])
    np.testing.assert_array_equal(table.column("right"), [0.0, 1.0, np.nan])
    assert table.column("called").tolist() == [True, True, False]
    assert table.column("tools").tolist() == [("python",), ("python",), ()]
    assert table.column("failure").tolist() == [None, None, "lost"]
    np.testing.assert_array_equal(table.column("parts.format"), [1.0, np.nan, np.nan])
    assert table.part_names == ["acc", "format"]
    assert table.split.tolist() == [1, 0, 0] and table.shard_index.tolist() == [0, 1, 1]
    codes, values = table.codes("sample_id")
    assert [values[code] for code in codes] == ["c", "a", "b"]
    uses = {info.shard: uses for info, uses in table.tool_uses()}
    assert uses["trajectories/step_000001"]["python"].calls == 1
    with pytest.raises(KeyError):
        table.column("parts.acccc")


def test_group_columns_are_over_rows_of_one_file_and_sample(run_dir, make):
    record(
        run_dir, train(1), [make("a", reward=0.1), make("b", reward=0.0), make("a", reward=0.1), make("a", reward=0.1)]
    )
    record(
        run_dir,
        train(2),
        [make("a", reward=1.0), make("a", reward=3.0), make("a", reward=None), make("n", reward=None)],
    )
    table = full(run_dir)
    assert table.column("group_size").tolist() == [3, 1, 3, 3, 3, 3, 3, 1]
    std = table.column("group_std").tolist()
    assert std[:7] == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0] and np.isnan(std[7])
    assert table.column("group_mean")[4] == 2.0


def numbered(run: RunDir, make) -> Table:
    for step in (1, 2):
        rows = [make(f"s{n}", step=step, reward=None if n == 2 else n / 2, answer=f"it is {n}") for n in range(4)]
        record(run, train(step), rows)
    record(run, "eval/step_000002.parquet", [make("e", step=-3, question="Wie viel ist Äpfel?")])
    return full(run)


def places(page):
    return [(row["shard"].rpartition("_")[2], row["sample_id"]) for row in page["rows"]]


def test_pages_are_sorted_with_null_last_and_the_newest_first_among_equals(run_dir, make):
    table = numbered(run_dir, make)
    page = listing(table, split="train", sort="reward")
    assert places(page)[:3] == [("000002", "s3"), ("000001", "s3"), ("000002", "s1")]
    assert places(page)[-2:] == [("000002", "s2"), ("000001", "s2")]
    assert places(listing(table, split="train", sort="reward", order="asc"))[-1] == ("000001", "s2")
    assert [row["answer"] for row in listing(table, split="train", sort="answer", order="asc", limit=3)["rows"]] == [
        "it is 0",
        "it is 0",
        "it is 1",
    ]
    assert [row["step"] for row in listing(table)["rows"]] == [2] * 5 + [1] * 4
    assert listing(table, sort="parts.acc")["rows"][0]["parts"]["acc"] == 1.5


def test_pages_count_cut_and_search(run_dir, make):
    table = numbered(run_dir, make)
    page = listing(table, split="train", filter="reward != null", sort="reward", offset=1, limit=2)
    assert (page["total"], page["matched"], page["offset"], len(page["rows"])) == (8, 6, 1, 2)
    assert page["rows"] == listing(table, split="train", filter="reward != null", sort="reward")["rows"][1:3]
    assert places(listing(table, search=" äPFEL ")) == [("000002", "e")]
    assert places(listing(table, search="IS 3", split="train")) == [("000002", "s3"), ("000001", "s3")]
    assert listing(table, search="nowhere")["matched"] == 0
    assert listing(table, offset=1000)["rows"] == []


def test_texts_sort_rightly_when_more_come(run_dir, make):
    record(run_dir, train(1), [make(answer="pear"), make(answer="apple")])
    table = full(run_dir)
    listing(table, sort="answer")
    record(run_dir, train(2), [make(answer="zebra"), make(answer="banana")])
    table.refresh()
    rows = listing(table, sort="answer", order="asc")["rows"]
    assert [row["answer"] for row in rows] == ["apple", "banana", "pear", "zebra"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"sort": "rewrd"}, "did you mean 'reward'"),
        ({"sort": "parts"}, "field to sort by"),
        ({"split": "trian"}, "did you mean 'train'"),
        ({"order": "up"}, "valid: asc, desc"),
        ({"filter": "rewrd > 1"}, "column 1"),
    ],
)
def test_a_page_that_makes_no_sense_says_so(run_dir, make, asked, said):
    record(run_dir, train(1), [make()])
    with pytest.raises(BadFilter, match=said):
        listing(full(run_dir), **asked)


def test_an_empty_run_has_an_empty_page(run_dir):
    page = listing(full(run_dir), filter="group_std == 0", sort="answer", search="x")
    assert (page["total"], page["matched"], page["rows"]) == (0, 0, [])


def test_texts_that_utf8_cannot_hold_are_mended(run_dir, make):
    record(run_dir, train(1), [make(answer="half \ud800 of it")])
    table = full(run_dir)
    shown = json.dumps(listing(table), ensure_ascii=False).encode().decode()
    assert "half \ufffd of it" in shown


def test_a_snapshot_stays_as_it_was_while_the_table_goes_on(run_dir, make):
    record(run_dir, train(1), [make("a")])
    table = full(run_dir)
    before = table.snapshot
    record(run_dir, train(1), [make("b"), make("c")])
    table.refresh()
    assert before.size == 1 and before.value("sample_id", 0) == "a" and table.size == 2


def test_a_run_without_folders_is_no_error(tmp_path: Path):
    assert Table(RunDir(tmp_path)).refresh() is False


def test_the_newest_are_held_and_what_is_left_out_is_told(run_dir, make):
    """Ten steps of three: with room for twelve the oldest files are left out, whole, however they are read."""
    for step in range(1, 11):
        rows = [make(f"s{step}-{n}", step=step, question=f"only in {step}", parts={"p": step}) for n in range(3)]
        record(run_dir, train(step), rows)
    at_once, growing = Table(run_dir, most=12), Table(run_dir, most=12)
    at_once.refresh(None)
    while growing.refresh(0.0) or growing.pending:
        assert growing.size <= 12
    for table in (at_once, growing):
        kept = [info.step for info in table.shards()]
        assert kept == list(range(11 - len(kept), 11)) and 2 <= len(kept) <= 4
        left = 10 - len(kept)
        assert table.left_out == {"trajectories": 3 * left, "files": left, "step": left}
        assert listing(table)["left_out"] == table.left_out and listing(table)["total"] == table.size
        assert table.pending == 0 and table.damaged == []
        assert not any(text == "only in 1" for text in table.codes("question")[1]), "their texts are let go"
        assert listing(table, filter="parts.p >= 10")["matched"] == 3
        assert sorted({row["question"] for row in listing(table)["rows"]}) == sorted(f"only in {step}" for step in kept)


def test_a_long_running_run_stays_within_the_bound(run_dir, make):
    table = Table(run_dir, most=12)
    for step in range(1, 40):
        record(run_dir, train(step), [make(f"s{step}-{n}", step=step) for n in range(3)])
        table.refresh()
        assert table.size <= 12 and table.shards()[-1].step == step
        values = table.codes("sample_id")[1]
        assert len(values) <= 13, "nor does what it knows of texts grow"
    assert table.left_out["trajectories"] + table.size == 39 * 3
    assert table.refresh() is False


def test_links_to_what_is_left_out_still_open(run_dir, make):
    for step in range(1, 8):
        record(run_dir, train(step), [make(f"s{step}-{n}", step=step, reward=n) for n in range(3)])
    table = Table(run_dir, most=6)
    table.refresh(None)
    assert "trajectories/step_000001" not in [info.shard for info in table.shards()]
    entry = table.entry("trajectories/step_000001", 2)
    assert (entry["sample_id"], entry["reward"], entry["step"], entry["row"]) == ("s1-2", 2.0, 1, 2)
    assert table.siblings("trajectories/step_000001", "s1-1") == [1]
    assert table.shard_size("trajectories/step_000002") == 3
    assert table.path("trajectories/step_000001").is_file()
    assert table.size <= 6
    with pytest.raises(NotThere, match="there is no row 3"):
        table.entry("trajectories/step_000001", 3)
    with pytest.raises(NotThere):
        table.entry("trajectories/step_000099", 0)


def test_one_file_larger_than_the_bound_is_shown_whole(run_dir, make):
    record(run_dir, train(1), [make(f"a{n}") for n in range(3)])
    record(run_dir, train(2), [make(f"b{n}", step=2) for n in range(9)])
    table = Table(run_dir, most=4)
    table.refresh(None)
    assert table.size == 9 and table.left_out == {"trajectories": 3, "files": 1, "step": 1}


def test_a_run_that_fits_leaves_nothing_out(run_dir, make):
    record(run_dir, train(1), [make()])
    assert full(run_dir).left_out is None and listing(full(run_dir))["left_out"] is None

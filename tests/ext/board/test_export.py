"""The list as a table to download: what the page shows, in its order, and nothing a spreadsheet would run."""

import csv
import io

import pytest

from turnwise.ext.board.export import TooMuch, csv_lines, safe_cell
from turnwise.ext.board.filters import BadFilter
from turnwise.ext.board.table import Table, listing
from turnwise.storage.index import INDEX, record

ASKED = {"split": "all", "filter": "", "search": "", "sort": "reward", "order": "asc"}


def test_the_rows_of_the_list_in_its_order_with_formulas_made_harmless(run_dir, make):
    evil = '=HYPERLINK("http://x","y")'
    made = [make("a", reward=1.0, answer=evil), make("b", reward=-1.0, answer="-7"), make("c", reward=None)]
    made += [make(f"d{n}", reward=0.5, question='two\nlines, "quoted"') for n in range(1200)]
    record(run_dir, "trajectories/step_000001.parquet", made)
    table = Table(run_dir)
    table.refresh(None)
    rows = list(csv.DictReader(io.StringIO("".join(csv_lines(table, **ASKED)))))
    assert [(row["shard"], int(row["row"])) for row in rows] == [
        (row["shard"], row["row"]) for row in listing(table, **ASKED, limit=2000)["rows"]
    ]
    by_sample = {row["sample_id"]: row for row in rows}
    assert by_sample["a"]["answer"] == f"'{evil}" and by_sample["b"]["answer"] == "-7"
    assert (by_sample["b"]["reward"], by_sample["c"]["reward"], by_sample["a"]["parts.acc"]) == ("-1.0", "", "1.0")
    assert by_sample["a"]["right"] == "true" and by_sample["d7"]["question"].startswith("two")
    assert len(list(csv_lines(table, **ASKED | {"filter": "reward > 0.7"}))) == 2, "the header and one piece"
    with pytest.raises(BadFilter):
        csv_lines(table, **ASKED | {"filter": "rewrd > 1"})


def test_no_table_lacks_rows_in_silence(run_dir, make):
    for step in (1, 2, 3):
        record(run_dir, f"trajectories/step_{step:06d}.parquet", [make(parts={f"{step}/{n}": 1.0 for n in range(70)})])
    table = Table(run_dir)
    table.refresh(None)
    with pytest.raises(TooMuch, match="210 reward parts"):
        csv_lines(table, **ASKED)
    (run_dir.path / INDEX).unlink()
    table = Table(run_dir)
    table.refresh(0)
    with pytest.raises(TooMuch, match="still to be read"):
        csv_lines(table, **ASKED)


@pytest.mark.parametrize("text", ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1"])
def test_what_begins_like_a_formula_is_a_text(text):
    assert safe_cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "42", "-42", "+0.5", "a=1", "'=1", " "])
def test_other_texts_and_plain_numbers_stay(text):
    assert safe_cell(text) == text

"""Reading files: formats, order, and one clear sentence for everything that can be wrong with a file."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.data.rows import name_files, read_rows
from turnwise.errors import DataError


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_json_lines_with_bom_crlf_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"x": 1}\r\n\r\n{"x": "é\u2028"}'.encode())
    assert [(row.name, row.number, row.values) for row in read_rows(path)] == [
        ("a.jsonl", 0, {"x": 1}),
        ("a.jsonl", 1, {"x": "é\u2028"}),
    ]


@pytest.mark.parametrize("text", ['[{"x": 1},\n {"x": 2}]', '{"x": 1}\n{"x": 2}\n', '\ufeff \n[{"x": 1}, {"x": 2}]'])
def test_json_holds_a_list_or_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert [row.values for row in read_rows(path)] == [{"x": 1}, {"x": 2}]


def test_parquet_rows_keep_their_order_over_batches(tmp_path: Path) -> None:
    path = tmp_path / "a.PARQUET"
    pq.write_table(pa.table({"x": list(range(1000))}), path, row_group_size=300)
    assert [(row.number, row.values["x"]) for row in read_rows(path)] == [(n, n) for n in range(1000)]


def test_parquet_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "big.parquet"
    pq.write_table(pa.table({"x": [os.urandom(2000) for _ in range(20_000)]}), path, row_group_size=20_000)
    before, most = pa.total_allocated_bytes(), 0
    for row in read_rows(path):
        if row.number % 64 == 0:
            most = max(most, pa.total_allocated_bytes() - before)
    assert path.stat().st_size > 30_000_000
    assert most < 12_000_000


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").touch()
    assert refusal(tmp_path / "trian.parquet").endswith("does not exist: did you mean 'train.parquet'?")
    assert "nor does its folder" in refusal(tmp_path / "no" / "train.parquet")


@pytest.mark.parametrize("name", ["a.xlsx", "parquet", "a.parquet.gz", "a.gz", "a", ""])
def test_an_unknown_suffix_names_the_known_ones(tmp_path: Path, name: str) -> None:
    assert ".parquet, .arrow, .json, .jsonl" in refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch()
    assert "0 bytes" in refusal(path)
    path.unlink()
    path.mkdir()
    assert "is a folder" in refusal(path)
    path.rmdir()
    os.mkfifo(path)
    assert "not a regular file" in refusal(path)
    assert "cannot be read" in refusal(tmp_path / ("x" * 300 + name)) or os.name != "posix"
    assert "does not exist" in refusal(tmp_path / f"\0{name}")


def test_a_file_without_read_permission(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    path.chmod(0)
    as_root = os.geteuid() == 0
    if as_root:
        os.seteuid(65534)
    try:
        assert "ermission denied" in refusal(path)
    finally:
        if as_root:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_files_without_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(" \n\n")
    assert refusal(path).endswith("has no rows")


def test_parquet_without_rows_and_json_with_an_empty_list(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet").endswith("has no rows")
    (tmp_path / "a.json").write_text("[]")
    assert refusal(tmp_path / "a.json").endswith("has no rows")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "a row is an object, this is a list"),
        (b"null", "a row is an object, this is nothing"),
        (b'{"x": "\xff"}', "not UTF-8 text"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"x":' * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\n\n' + line + b"\n")
    text = refusal(path)
    assert f"{path}:3: " in text
    assert problem in text
    assert len(text) < 400


def test_a_json_list_is_checked_item_by_item(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"x": 1}, 7]')
    assert refusal(path).endswith("a.json row 1: a row is an object, this is a number")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_parquet(tmp_path: Path, share: float) -> None:
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"x": [str(n) for n in range(5000)]}), whole)
    data = whole.read_bytes()
    path = tmp_path / "a.parquet"
    path.write_bytes(data[: max(1, int(share * len(data)))])
    assert "not a readable parquet file" in refusal(path)


def test_parquet_with_bad_utf8_or_a_column_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    bad = pa.StringArray.from_buffers(1, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe"))
    pq.write_table(pa.table({"x": bad}), path)
    assert "not a readable parquet file" in refusal(path)
    pq.write_table(pa.table([[1], [2]], names=["x", "x"]), path)
    assert "column 'x' appears twice" in refusal(path)


@given(data=st.binary(min_size=1, max_size=60), suffix=st.sampled_from([".jsonl", ".json", ".parquet"]))
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_rows_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(data)
    try:
        assert all(isinstance(row.values, dict) for row in read_rows(path))
    except DataError as error:
        assert str(path) in str(error)


def test_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"x": 1}))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [row.values for row in read_rows("~/a.jsonl")] == [{"x": 1}]
    monkeypatch.chdir(tmp_path)
    assert [row.file for row in read_rows(Path("a.jsonl"))] == [Path("a.jsonl")]
    assert "no such home folder" in refusal(Path("~nobody-has-this-name/a.jsonl"))


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    paths = ["/d/gsm8k/v1/train.parquet", "/d/math/v1/train.parquet", "/d/math/test.parquet"]
    assert list(name_files(paths).values()) == ["gsm8k/v1/train.parquet", "math/v1/train.parquet", "test.parquet"]
    with pytest.raises(DataError, match="given twice"):
        name_files(["a/x.jsonl", "a/../a/x.jsonl"])
    with pytest.raises(DataError, match="no data files"):
        name_files([])

"""Writing: the round trip gives equal samples, and a file is whole or not there."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.data.rows import Row, read_rows
from turnwise.data.samples import to_sample
from turnwise.data.write import write_rows
from turnwise.errors import DataError, StorageError

_name = st.text(min_size=1, max_size=4).filter(str.strip)
_int64 = st.integers(-(2**63), 2**63 - 1)


def _members(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects in which each member may be absent or null."""
    return st.fixed_dictionaries({}, optional={name: st.none() | value for name, value in members.items()})


_kwargs = _members(
    text=st.text(max_size=4),
    number=_int64,
    deep=_members(real=st.floats(allow_nan=False, allow_infinity=False), empty=st.just({}), names=st.lists(_name)),
    items=st.lists(st.none() | _members(x=st.booleans(), y=st.just({})), max_size=3),
)
_tools = _members(
    search=_members(create_kwargs=_kwargs, execute_kwargs=_kwargs),
    calc=_members(create_kwargs=_kwargs),
    none=st.just({}),
)
_extra = _members(
    index=_int64,
    split=st.text(max_size=3),
    need_tools_kwargs=st.booleans(),
    tools_kwargs=_tools,
    tool_selection=st.lists(_name, max_size=2, unique=True),
    interaction_kwargs=_members(name=_name, query=st.text(max_size=4), more=_kwargs),
)
_roles = st.sampled_from(["system", "user", "assistant", "tool"])
_message = st.fixed_dictionaries(
    {"role": _roles, "content": st.text(max_size=6)}, optional={"name": st.none() | _name, "tool_call_id": _name}
)
_others = {
    "reward_model": st.none() | _members(style=_name, ground_truth=st.text(max_size=4)),
    "extra_info": st.none() | _extra,
    "agent_name": st.none() | _name,
    "tools_kwargs": st.none() | st.just({}),
    "uid": _name,
    "other": st.lists(_kwargs, max_size=2),
}


def _dataset(prompt: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(
        st.fixed_dictionaries({"data_source": _name, "prompt": prompt}, optional=_others), min_size=1, max_size=5
    )


@given(rows=_dataset(st.text(max_size=6)) | _dataset(st.lists(_message, min_size=1, max_size=3)))
@settings(max_examples=200, deadline=None)
def test_the_round_trip_gives_equal_samples(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    for name in ("round.parquet", "round.jsonl"):
        path = tmp_path_factory.getbasetemp() / name
        assert write_rows(rows, path) == len(rows)
        given_samples = [to_sample(Row(path, n, values), prompt_key="prompt") for n, values in enumerate(rows)]
        assert [to_sample(row, prompt_key="prompt") for row in read_rows(path)] == given_samples


def test_bytes_and_nan_survive_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rows([{"x": b"\x00\xff", "y": float("nan")}, {"y": 1.0}], path)
    first, second = (row.values for row in read_rows(path))
    assert first["x"] == b"\x00\xff"
    assert first["y"] != first["y"]
    assert second == {"x": None, "y": 1.0}


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"x": 1}, {"x": "a"}], "column 'x': no one parquet type fits"),
        ([{"x": {"y": 1}}, {"x": {"y": 2.5}}], "row 0: x.y: the rows disagree in type: parquet would store this int"),
        ([{"x": [1]}, {"x": 1}], "column 'x': no one parquet type fits"),
        ([{"x": 2**70}], "column 'x': no one parquet type fits"),
        ([], "there are no rows to write"),
        ([{"x": 1}, {}], "row 1: the row is empty"),
        ([{"x": "\ud800"}], "row 0: x: not valid Unicode"),
    ],
)
def test_what_parquet_would_change_is_refused(tmp_path: Path, rows: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(DataError) as caught:
        write_rows(rows, tmp_path / "a.parquet")
    assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [b"\x00", float("nan"), 10**5000], ids=["bytes", "nan", "huge"])
def test_what_json_cannot_say_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match=r"a.jsonl row 1: cannot be written as JSON"):
        write_rows([{"x": 1}, {"x": value}], tmp_path / "a.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"written as .parquet or .jsonl, not '.csv'"):
        write_rows([{"x": 1}], tmp_path / "a.csv")


def _break_off() -> Iterator[dict[str, Any]]:
    yield {"x": 1}
    raise RuntimeError("the source broke")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_an_old_file_survives_every_failure(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new folder" / name
    write_rows([{"x": "old"}], path)
    with pytest.raises(RuntimeError):
        write_rows(_break_off(), path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # what a full disk looks like: a write fails half-way
    try:
        with pytest.raises(StorageError, match="cannot write .*: File too large"):
            write_rows([{"x": f"{n:0200}"[::-1] + str(hash(n))} for n in range(5000)], path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [row.values for row in read_rows(path)] == [{"x": "old"}]
    assert [entry.name for entry in path.parent.iterdir()] == [name]


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(StorageError, match="cannot write .*: Is a directory"):
        write_rows([{"x": 1}], tmp_path / "a.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write"):
        write_rows([{"x": 1}], tmp_path / "file" / "a.jsonl")

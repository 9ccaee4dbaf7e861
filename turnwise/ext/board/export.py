"""The list of trajectories as CSV, all of it, in the order the page shows, and safe to open in a spreadsheet."""

import csv
import io
import math
import re
from collections.abc import Iterator
from typing import Any

from turnwise.ext.board.columns import GROUPED, KINDS, Array, ColumnKind, Snapshot
from turnwise.ext.board.table import PART, Table, chosen
from turnwise.storage.index import COLUMNS

MOST_PARTS = 200
"""Reward parts, each a column; rows need no bound of their own, for a table holds no more than its own."""
_CHUNK = 500
_PLACE = ("shard", "row", "split")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?", re.ASCII)
_FORMULA = tuple("=+-@\t\r\n＝＋－＠")


class TooMuch(ValueError):
    """What cannot be given as one table now; the text says why."""


def csv_lines(table: Table, *, split: str, filter: str, search: str, sort: str, order: str) -> Iterator[str]:
    """Lines of CSV with a header, in pieces; BadFilter and TooMuch are raised before the first."""
    snapshot = table.snapshot
    rows = chosen(snapshot, split=split, filter=filter, search=search, sort=sort, order=order)
    if table.pending:
        raise TooMuch(f"{table.pending} files are still to be read; a table now would lack their trajectories")
    parts = snapshot.part_names
    if len(parts) > MOST_PARTS:
        raise TooMuch(f"{len(parts)} reward parts are more than the {MOST_PARTS} columns that a table has for them")
    return _lines(snapshot, rows, parts)


def _lines(snapshot: Snapshot, rows: Array, parts: list[str]) -> Iterator[str]:
    names = [name for name in COLUMNS if KINDS[name] is not ColumnKind.PARTS]
    yield _written([[*_PLACE, *names, *GROUPED, *(safe_cell(PART + part) for part in parts)]])
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        yield _written(_cells(snapshot, int(row), names, parts) for row in chunk)


def _cells(snapshot: Snapshot, row: int, names: list[str], parts: list[str]) -> list[Any]:
    info = snapshot.infos[int(snapshot.shard_index[row])]
    location = [info.shard, row - int(snapshot.starts[snapshot.places[info.shard]]), info.split]
    values = [_cell(snapshot.value(name, row)) for name in names]
    rewards = snapshot.parts_of(row)
    group = [_cell(float(snapshot.groups[name][row])) for name in GROUPED]
    return [*location, *values, *group, *(_cell(rewards.get(part)) for part in parts)]


def _cell(value: Any) -> Any:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case float():
            return value if math.isfinite(value) else ""
        case str():
            return safe_cell(value)
        case list():
            return safe_cell(" ".join(value))
    return value


def safe_cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula: what begins like one gets an apostrophe; plain numbers stay."""
    risky = text.lstrip(" ").startswith(_FORMULA) and not _NUMBER.fullmatch(text)
    return f"'{text}" if risky else text


def _written(lines: Any) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(lines)
    return text.getvalue()

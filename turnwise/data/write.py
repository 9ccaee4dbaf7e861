"""Rows to a parquet or JSON-lines file, whole or not at all, and exactly as they were given."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turnwise.data.rows import Row, RowError, expand
from turnwise.data.values import FieldError, join, plain, shorten
from turnwise.errors import DataError
from turnwise.system.files import replacing


def write_rows(rows: Iterable[Mapping[str, Any]], path: str | Path) -> int:
    """Write all rows and return their number; `read_rows` gives them back with null and {} members left out.

    All rows are made before the disk is touched. A value that the format would change (parquet has one type per
    column) is refused.
    """
    path = expand(path)
    writers = {".parquet": _write_parquet, ".jsonl": _write_json_lines}
    if path.suffix.lower() not in writers:
        raise DataError(f"{path}: rows are written as {' or '.join(writers)}, not {path.suffix!r}")
    records: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        try:
            record = plain(dict(row), "")
        except FieldError as error:
            raise RowError(Row(path, number, {}), error.field, error.problem) from error
        if record is None:
            raise RowError(Row(path, number, {}), "", "the row is empty")
        records.append(record)
    if not records:
        raise DataError(f"{path}: there are no rows to write")
    writers[path.suffix.lower()](records, path)
    return len(records)


def _write_json_lines(records: list[dict[str, Any]], path: Path) -> None:
    with replacing(path) as file:
        for number, record in enumerate(records):
            try:
                text = json.dumps(record, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError) as error:  # bytes, NaN, and numbers with more digits than Python writes
                problem = f"cannot be written as JSON: {shorten(str(error), 200)}"
                raise RowError(Row(path, number, record), "", problem) from error
            file.write(text.encode() + b"\n")


def _write_parquet(records: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa  # here, because it takes long to import and many commands never write parquet
    import pyarrow.parquet as pq

    columns = list(dict.fromkeys(column for record in records for column in record))
    arrays = []
    for column in columns:
        values = [record.get(column) for record in records]
        try:
            array = pa.array(values)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            problem = f"no one parquet type fits the values of all rows: {shorten(str(error), 200)}"
            raise DataError(f"{path}: column {column!r}: {problem}") from error
        for number, (value, stored) in enumerate(zip(values, array.to_pylist(), strict=True)):
            try:
                _require_same(value, plain(stored, column), column)
            except FieldError as error:
                raise RowError(Row(path, number, records[number]), error.field, error.problem) from error
        arrays.append(array)
    with replacing(path) as file:
        pq.write_table(pa.table(arrays, names=columns), file)


def _require_same(original: Any, stored: Any, field: str) -> None:
    """Raise when Arrow would store another value, such as 1.0 for 1 because another row has 2.5."""
    if type(original) is not type(stored):
        given_type, stored_type = type(original).__name__, type(stored).__name__
        raise FieldError(field, f"the rows disagree in type: parquet would store this {given_type} as {stored_type}")
    match original:
        case dict():
            if original.keys() != stored.keys():
                raise FieldError(field, "parquet would change its members")
            for key, member in original.items():
                _require_same(member, stored[key], join(field, key))
        case list():
            if len(original) != len(stored):
                raise FieldError(field, "parquet would change its length")
            for index, (ours, theirs) in enumerate(zip(original, stored, strict=True)):
                _require_same(ours, theirs, f"{field}[{index}]")
        case float() if math.isnan(original) and math.isnan(stored):
            return
        case _:
            if original != stored:
                raise FieldError(field, "parquet would change its value")

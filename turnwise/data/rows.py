"""Rows as they stand in a file: parquet and JSON, streamed, with every failure named by file and place."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.data.values import describe, shorten
from turnwise.errors import DataError, nearest

BATCH_ROWS = 64
BUFFER_BYTES = 1 << 20
_JSON_LINES = (".jsonl", ".jsonlines", ".ndjson")
SUFFIXES = (".parquet", ".json", *_JSON_LINES)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `Row(Path("data/train.parquet"), 17, {"prompt": ...})`. Numbers count from 0."""

    file: Path
    number: int
    values: dict[str, Any]
    label: str = ""
    """The file's name where it alone is not enough; see `name_files`."""

    @property
    def name(self) -> str:
        """The file's name in messages and sample ids."""
        return self.label or self.file.name


def as_row(values: Any, file: Path, number: int, label: str) -> Row:
    """A row that somebody's code made."""
    return Row(file, number, _as_record(values, f"{label} row {number}"), label)


class RowError(DataError):
    """A row that cannot be used: `train.parquet row 17: prompt[1].role: unknown role ...`."""

    def __init__(self, row: Row, field: str, problem: str) -> None:
        super().__init__(f"{row.name} row {row.number}: {f'{field}: ' if field else ''}{problem}")
        self.row = row
        self.field = field
        self.problem = problem


def read_rows(path: str | Path, *, label: str = "") -> Iterator[Row]:
    """The rows of a parquet or JSON file in order; errors are raised while reading."""
    path = expand(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path}: cannot tell the format from the suffix {suffix!r}; known are {', '.join(SUFFIXES)}")
    _require_file(path)
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty (0 bytes)")
        records = _parquet(path) if suffix == ".parquet" else _json(path, suffix)
        number = -1
        for number, values in enumerate(records):
            yield Row(path, number, values, label)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or shorten(str(error), 200)}") from error
    if number < 0:
        raise DataError(f"{path}: the file has no rows")


def name_files(paths: Iterable[str | Path]) -> dict[Path, str]:
    """Each path with the name for messages and sample ids.

    That is the file's name; files of the same name also get as many parent folders as tell them apart, so that
    sample ids stay unique over `gsm8k/train.parquet` and `math/train.parquet`.
    """
    places = [(path, Path(os.path.abspath(path)).parts) for path in map(expand, paths)]
    files = Counter(os.path.realpath(path) for path, _ in places)
    tails = Counter(parts[-length:] for _, parts in places for length in range(1, len(parts) + 1))
    names: dict[Path, str] = {}
    for path, parts in places:
        if files[os.path.realpath(path)] > 1:
            raise DataError(f"{path}: the file is given twice")
        length = next(length for length in range(1, len(parts) + 1) if tails[parts[-length:]] == 1)
        names[path] = "/".join(parts[-length:])
    if not names:
        raise DataError("no data files are given")
    return names


def expand(path: str | Path) -> Path:
    """The path with a leading ~ replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{path}: there is no such home folder") from error


def _require_file(path: Path) -> None:
    """Raise unless `path` is a regular file; a missing one is answered with the nearest name in its folder."""
    try:
        if path.is_file():
            return
        if path.is_dir():
            raise DataError(f"{path}: is a folder, not a file: {nearest(path.name, _data_files(path))}")
        if path.exists():
            raise DataError(f"{path}: is not a regular file")
        if not path.parent.is_dir():
            raise DataError(f"{path}: does not exist, nor does its folder")
        raise DataError(f"{path}: does not exist: {nearest(path.name, _data_files(path.parent))}")
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise DataError(f"{path}: cannot be read: {shorten(str(error), 200)}") from error


def _data_files(folder: Path) -> list[str]:
    named = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return [entry.name for entry in named if entry.suffix.lower() in SUFFIXES]


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa  # here, because it takes long to import and many commands never read parquet
    import pyarrow.parquet as pq

    # What Arrow raises for broken bytes, bad UTF-8, names that stand twice, and times Python cannot hold.
    failures = (pa.ArrowException, ValueError, KeyError, OverflowError, UnicodeError)
    done = 0
    try:
        # Without both settings Arrow holds a whole row group in memory.
        with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            columns = file.schema_arrow.names
            twice = sorted({column for column in columns if columns.count(column) > 1})
            if twice:
                raise DataError(f"{path}: column {twice[0]!r} stands twice")
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                records = batch.to_pylist()
                done += len(records)
                yield from records
    except failures as error:
        problem = f"not a readable parquet file (after {done} rows): {shorten(str(error), 200)}"
        raise DataError(f"{path}: {problem}") from error


def _json(path: Path, suffix: str) -> Iterator[dict[str, Any]]:
    """JSON lines, or a .json file that holds one list."""
    if suffix == ".json":
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith(b"["):
            for number, value in enumerate(_parse(path.read_bytes(), str(path))):
                yield _as_record(value, f"{path} row {number}")
            return
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{line_number}"
                yield _as_record(_parse(line, place), place)


def _parse(data: bytes, place: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise DataError(f"{place}: JSON nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, and numbers with more digits than Python reads
        raise DataError(f"{place}: not valid JSON: {shorten(str(error), 200)}") from error


def _as_record(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: a row is an object, this is {describe(value)}")
    return value

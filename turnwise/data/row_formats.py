"""The formats of data files: parquet, Arrow, JSON, CSV, packed with gzip or not; rows one after the other."""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from turnwise.data.values import describe, shorten
from turnwise.errors import DataError

BATCH_ROWS = 64
BUFFER_BYTES = 1 << 20
LONGEST_LINE = 1 << 30
"""Bytes of one line, or of a list in one file: a packed file of a few kilobytes may unfold without end."""
LONGEST_CELL = 1 << 26
PACKED = ".gz"
_NESTED = ("reward_model", "extra_info", "tools_kwargs", "interaction_kwargs", "images", "tools")
"""Columns whose cells are JSON in a table of texts; a prompt is, where it is a list."""

Records = Iterator[dict[str, Any]]


def ending_of(path: Path) -> str:
    """`.jsonl.gz` of a/b.jsonl.gz, `.parquet` of A.PARQUET."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() + last if last == PACKED else last


def read_records(path: Path) -> Records:
    """The rows of a file whose ending is among FORMATS, as plain dicts."""
    return FORMATS[ending_of(path)](path)


def as_record(value: Any, where: str) -> dict[str, Any]:
    """The row as an object; DataError, which names `where`, for any other value."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row is an object, this is {describe(value)}")
    return value


# --- columns ------------------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Records:
    import pyarrow.parquet as pq  # here, because it takes long to import and many commands never read parquet

    # Without both settings Arrow holds a whole row group in memory.
    with _reading(path, "parquet") as done, pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        _check_names(file.schema_arrow.names, path)
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            records = batch.to_pylist()
            done.rows += len(records)
            yield from records


def _arrow(path: Path) -> Records:
    """A stream, as the datasets package writes them, or a file of Arrow's."""
    import pyarrow as pa

    with _reading(path, "Arrow") as done, pa.memory_map(str(path)) as source:
        try:
            batches: Any = pa.ipc.open_stream(source)
            count = None
        except (pa.ArrowInvalid, OSError):
            source.seek(0)
            batches = pa.ipc.open_file(source)
            count = batches.num_record_batches
        _check_names(batches.schema.names, path)
        for batch in batches if count is None else map(batches.get_batch, range(count)):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                records = batch.slice(start, BATCH_ROWS).to_pylist()
                done.rows += len(records)
                yield from records


class _reading:
    """Says how far a file could be read when Arrow fails: broken bytes, bad UTF-8, times that Python cannot hold."""

    def __init__(self, path: Path, format_name: str) -> None:
        self.rows = 0
        self._path, self._format = path, format_name

    def __enter__(self) -> "_reading":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import pyarrow as pa

        if isinstance(error, pa.ArrowException | ValueError | KeyError | OverflowError | UnicodeError):
            problem = f"not a readable {self._format} file (after {self.rows} rows): {shorten(str(error), 200)}"
            raise DataError(f"{self._path}: {problem}") from error


def _check_names(columns: list[str], path: Path) -> None:
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise DataError(f"{path}: column {twice[0]!r} appears twice")


# --- JSON ---------------------------------------------------------------------------------------------------------


def _json(path: Path) -> Records:
    """A list of objects, or JSON lines."""
    with _opened(path) as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        yield from _json_lines(path)
        return
    with _opened(path) as file:
        content = file.read(LONGEST_LINE + 1)
    if len(content) > LONGEST_LINE:
        raise DataError(f"{path}: a list of more than {LONGEST_LINE / 2**30:g} GiB: write JSON lines, or parquet")
    for number, value in enumerate(_parse(content, str(path))):
        yield as_record(value, f"{path} row {number}")


def _json_lines(path: Path) -> Records:
    with _opened(path) as file:
        for line_number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            where = f"{path}:{line_number}"
            if len(line) > LONGEST_LINE:
                raise DataError(f"{where}: a line of more than {LONGEST_LINE / 2**30:g} GiB")
            if line.strip():
                yield as_record(_parse(line, where), where)


def _parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise DataError(f"{where}: JSON nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, and numbers with more digits than Python reads
        raise DataError(f"{where}: not valid JSON: {shorten(str(error), 200)}") from error


def _opened(path: Path) -> AbstractContextManager[IO[bytes]]:
    return _Unpacked(path) if path.suffix.lower() == PACKED else path.open("rb")


class _Unpacked:
    """A gzip file as bytes; one that is damaged is said to be."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, gzip.open(path, "rb")  # noqa: SIM115 (it is the context manager)

    def __enter__(self) -> IO[bytes]:
        return self._file  # type: ignore[return-value]  # a GzipFile reads as any file does

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if isinstance(error, gzip.BadGzipFile | EOFError | zlib.error):
            raise DataError(f"{self._path}: not a readable gzip file: {shorten(str(error), 200)}") from error


# --- tables of texts ----------------------------------------------------------------------------------------------


def _table(delimiter: str) -> Callable[[Path], Records]:
    def read(path: Path) -> Records:
        csv.field_size_limit(LONGEST_CELL)
        with _opened(path) as file:
            rows = csv.reader(_texts(file, path), delimiter=delimiter, strict=True)
            try:
                header = next(rows, [])
                _check_names(header, path)
                for cells in rows:
                    if cells:
                        yield _record(header, cells, f"{path}:{rows.line_num}")
            except csv.Error as error:
                raise DataError(f"{path}:{rows.line_num}: not a readable table: {error}") from error

    return read


def _texts(file: IO[bytes], path: Path) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_CELL), b""), start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def _record(header: list[str], cells: list[str], where: str) -> dict[str, Any]:
    """A row of a table: an empty cell is nothing, `reward_model.ground_truth` is a member, JSON is what it says."""
    if len(cells) != len(header):
        raise DataError(f"{where}: {len(cells)} cells under {len(header)} columns")
    record: dict[str, Any] = {}
    for name, cell in zip(header, cells, strict=True):
        if not cell:
            continue
        *parents, last = name.split(".")
        place_of = record
        for parent in parents:
            place_of = place_of.setdefault(parent, {})
            if not isinstance(place_of, dict):
                raise DataError(f"{where}: the columns {parent!r} and {name!r} do not go together")
        place_of[last] = _value(name, cell, where)
    return record


def _value(name: str, cell: str, where: str) -> Any:
    is_list = cell.lstrip().startswith("[{")  # a prompt of messages
    if name not in _NESTED and not is_list:
        return cell
    if not cell.lstrip().startswith(("{", "[")):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        if name not in _NESTED:
            return cell  # a text that only begins so
        raise DataError(f"{where}: {name}: not valid JSON: {shorten(str(error), 200)}") from error


FORMATS: dict[str, Callable[[Path], Records]] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".json": _json,
    ".jsonl": _json_lines,
    ".jsonlines": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _table(","),
    ".tsv": _table("\t"),
}
"""Readers by ending."""
FORMATS |= {f"{ending}{PACKED}": read for ending, read in FORMATS.items() if ending not in (".parquet", ".arrow")}

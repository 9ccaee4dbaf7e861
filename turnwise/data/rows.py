"""Rows as they stand in a file, streamed, with every failure named by file and place."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.data.row_formats import FORMATS, as_record, ending_of, read_records
from turnwise.data.values import shorten
from turnwise.errors import DataError
from turnwise.errors.nearest_name import nearest


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
    return Row(file, number, as_record(values, f"{label} row {number}"), label)


class RowError(DataError):
    """A row that cannot be used: `train.parquet row 17: prompt[1].role: unknown role ...`."""

    def __init__(self, row: Row, field: str, problem: str) -> None:
        super().__init__(f"{row.name} row {row.number}: {f'{field}: ' if field else ''}{problem}")
        self.row = row
        self.field = field
        self.problem = problem


def read_rows(path: str | Path, *, label: str = "") -> Iterator[Row]:
    """The rows of a file in order; errors are raised while reading."""
    path = expand(path)
    if not is_data(path):
        endings = ", ".join(FORMATS)
        raise DataError(f"{path}: cannot tell the format from the ending {ending_of(path)!r}; known are {endings}")
    _require_file(path)
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty (0 bytes)")
        number = -1
        for number, values in enumerate(read_records(path)):
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
        # The datasets package calls the first file of every split data-00000-of-00001.arrow.
        least = min(2 if path.suffix == ".arrow" else 1, len(parts))
        length = next(length for length in range(least, len(parts) + 1) if tails[parts[-length:]] == 1)
        names[path] = "/".join(parts[-length:])
    if not names:
        raise DataError("no data files are given")
    return names


def is_data(path: Path) -> bool:
    """Whether the ending of a file is one that is read."""
    return ending_of(path) in FORMATS


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
    return [entry.name for entry in named if is_data(entry)]

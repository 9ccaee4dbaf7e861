"""Types of tables whose columns of images become paths, or paths become images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnwise.data.images.cells import ROOT
from turnwise.data.rows import read_rows
from turnwise.errors import DataError


def schema_of(source: Path) -> Any:
    """Of a parquet file; None for JSON, which has none."""
    if source.suffix.lower() != ".parquet" or not source.is_file():  # whoever reads it says so
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(source).remove_metadata()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{source}: not a readable parquet file: {str(error)[:200]}") from error


def inferred(source: Path, named: tuple[str, ...]) -> Any:
    """The schema of a JSON file's rows, all of which are looked at; columns of images are taken for paths."""
    import pyarrow as pa

    columns: dict[str, list[Any]] = {}
    lists: set[str] = set()
    for row in read_rows(source):
        for name, value in row.values.items():
            column = columns.setdefault(name, [])
            column.append(None if name in named else value)
            if name in named and isinstance(value, list):
                lists.add(name)
    fields = []
    for name, values in columns.items():
        try:
            kind = (
                pa.array(values).type if name not in named else pa.list_(pa.string()) if name in lists else pa.string()
            )
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            problem = f"no one parquet type fits the values of all rows: {str(error)[:200]}"
            raise DataError(f"{source}: column {name!r}: {problem}") from error
        fields.append(pa.field(name, kind))
    return pa.schema(fields)


def with_paths(schema: Any, named: tuple[str, ...]) -> Any:
    """The schema with texts in the place of images."""
    import pyarrow as pa

    changed = _changed(schema, named, lambda kind: pa.list_(pa.string()) if _holds_many(kind) else pa.string())
    return pa.schema([field for field in changed if field.name != ROOT])


def with_cells(schema: Any, named: tuple[str, ...], form: str) -> Any:
    """The schema with images in the place of texts, as `object`, `bytes` or `text`; no path is left to look for."""
    import pyarrow as pa

    both = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cell = {"object": both, "bytes": pa.binary(), "text": pa.string()}[form]
    changed = _changed(schema, named, lambda kind: pa.list_(cell) if _holds_many(kind) else cell)
    return pa.schema([field for field in changed if field.name != ROOT])


def _changed(schema: Any, named: tuple[str, ...], change: Callable[[Any], Any]) -> Any:
    import pyarrow as pa

    return pa.schema([field.with_type(change(field.type)) if field.name in named else field for field in schema])


def _holds_many(kind: Any) -> bool:
    """Whether a cell is a list of images; an array of numbers is one image, byte by byte."""
    import pyarrow.types as types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and not types.is_integer(kind.value_type)

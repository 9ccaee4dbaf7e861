"""Rows of `data.dataset`: a function of the user's reads the files, `def rows(files) -> Iterable[Mapping]`."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from turnwise.errors import DataError, PluginError, TurnwiseError, one_line
from turnwise.system.plugins import adapted, load

RowsFunction = Callable[[list[str]], Iterable[Mapping[str, Any]]]
"""The paths of the files of a split, as the config has them, to their rows."""


def dataset_rows(
    spec: str, files: Sequence[str], prompt_key: str, tokenizer: Callable[[], Any]
) -> Iterator[dict[str, Any]]:
    """The rows of a dataset, in its order; extensions read other kinds, and may ask for the model's tokenizer."""
    value = load(spec, "dataset")
    rows: RowsFunction | None = value if _is_function(value) else None
    if rows is None:
        rows = adapted("dataset", value, {"prompt_key": prompt_key, "tokenizer": tokenizer})
    if rows is None:
        raise PluginError(
            f"dataset {spec!r} must be a function `rows(files)` that gives rows, or a class that an extension reads; "
            f"it is {_described(value)}"
        )
    try:
        for number, row in enumerate(rows(list(files))):
            if not isinstance(row, Mapping):
                raise DataError(f"dataset {spec!r}: row {number} is a {type(row).__name__}, not a dict of columns")
            yield dict(row)
    except TurnwiseError:
        raise
    except Exception as error:  # a user's code, run before anything else: its author reads the message
        raise PluginError(f"dataset {spec!r} failed: {one_line(error)}") from error


def _is_function(value: object) -> bool:
    if isinstance(value, type) or not callable(value):
        return False
    try:
        inspect.signature(value).bind([])
    except (TypeError, ValueError):
        return False
    return True


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isfunction(value):
        return f"{value.__name__}{inspect.signature(value)}"
    return f"a {type(value).__name__}"

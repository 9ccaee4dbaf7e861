"""Dataset classes as verl's data.custom_cls names them: made of files, one row for each item."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.data.custom_dataset import RowsFunction
from turnwise.errors import DataError
from turnwise.ext.verl.omega import omega_conf

_TENSORS = ("input_ids", "attention_mask", "position_ids", "raw_prompt_ids", "dummy_tensor", "full_prompts", "index")
"""Columns that verl's datasets add for its own engine; ours renders and counts for itself."""


def dataset(value: Any, entry: Mapping[str, Any]) -> RowsFunction | None:
    """The adapter: a class with `__len__` and `__getitem__` as a function that gives rows; None for anything else.

    The class is given what verl gives: files, tokenizer, processor, config.
    """
    if not isinstance(value, type) or not all(hasattr(value, name) for name in ("__len__", "__getitem__")):
        return None
    kind, prompt_key = value, str(entry["prompt_key"])

    def rows(files: list[str]) -> Iterator[dict[str, Any]]:
        arguments = _arguments(files, prompt_key, entry["tokenizer"]())
        parameters = inspect.signature(kind).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        items: Any = kind(
            **{name: argument for name, argument in arguments.items() if open_ended or name in parameters}
        )
        for number in range(len(items)):
            yield _row(items[number], prompt_key, f"{kind.__name__}[{number}]")

    return rows


def _arguments(files: list[str], prompt_key: str, tokenizer: Any) -> dict[str, Any]:
    config = omega_conf().create({"prompt_key": prompt_key, "max_prompt_length": 2**31 - 1, "truncation": "error",
                               "filter_overlong_prompts": False, "return_raw_chat": True,
                               "train_files": files, "val_files": files})  # fmt: skip
    return {"data_files": files, "tokenizer": tokenizer, "processor": None, "config": config, "max_samples": -1}


def _row(item: Any, prompt_key: str, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise DataError(f"{where} is a {type(item).__name__}, not a dict of columns")
    row = {name: value for name, value in item.items() if name not in _TENSORS and not hasattr(value, "numel")}
    prompt = row.pop("raw_prompt", None)
    if prompt_key not in row and prompt is not None:
        row[prompt_key] = list(prompt)
    if prompt_key not in row:
        raise DataError(f"{where} has neither {prompt_key!r} nor 'raw_prompt'")
    return row

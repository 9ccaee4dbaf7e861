"""Rows of a Dataset class of the user's, such as verl's data.custom_cls names: files in, one row for each item."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from turnwise.errors import DataError, PluginError, TurnwiseError, one_line
from turnwise.plugins import load

_TENSORS = ("input_ids", "attention_mask", "position_ids", "raw_prompt_ids", "dummy_tensor", "full_prompts", "index")
"""Columns that verl's datasets add for its own engine; ours renders and counts for itself."""


def dataset_rows(spec: str, files: Sequence[str], prompt_key: str, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The rows, in the order of the dataset. It is given what verl gives: files, tokenizer, processor, config."""
    from omegaconf import OmegaConf

    kind = load(spec, "dataset")
    if not isinstance(kind, type) or not all(hasattr(kind, name) for name in ("__len__", "__getitem__")):
        raise PluginError(f"dataset {spec!r} must be a class with __len__ and __getitem__")
    config = OmegaConf.create({"prompt_key": prompt_key, "max_prompt_length": 2**31 - 1, "truncation": "error",
                               "filter_overlong_prompts": False, "return_raw_chat": True,
                               "train_files": list(files), "val_files": list(files)})  # fmt: skip
    every = {"data_files": list(files), "tokenizer": tokenizer, "processor": None, "config": config, "max_samples": -1}
    parameters = inspect.signature(kind).parameters.values()
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters}
    try:
        made = kind(**{name: value for name, value in every.items() if open_ended or name in names})
        for number in range(len(made)):
            yield _row(made[number], prompt_key, f"{spec}[{number}]")
    except TurnwiseError:
        raise
    except Exception as error:  # a user's code, run before anything else: its author reads the message
        raise PluginError(f"dataset {spec!r} failed: {one_line(error)}") from error


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

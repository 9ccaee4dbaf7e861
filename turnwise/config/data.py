"""Knobs of the rows: which files, and how they are read."""

from dataclasses import dataclass
from typing import ClassVar

from turnwise.config.choices import (
    Overlong,
)
from turnwise.config.knobs import (
    also,
    at_least,
    harmless,
    knob,
    only,
    only_engines,
    path,
    reaches,
)
from turnwise.config.marks import changes_work, key_in


@dataclass
class DataConfig:
    """Which files samples come from, and how they are read."""

    EVERY_KNOB: ClassVar = (
        changes_work(),
        key_in("HF_TOKEN"),
    )

    train_files: list[str] = knob([], path(), reaches("network", None))
    """Rows to train on (docs/tasks.md); empty uses the task's own generator. Parquet, json, jsonl, csv, tsv (or
    packed: csv.gz), globs of them, folders, those of `save_to_disk`, or hub datasets (hf://datasets/OWNER/NAME/FILE).
    Set it to train on your data."""
    eval_files: list[str] = knob([], path(), reaches("network", None))
    """Files to evaluate on, in the same shape; empty uses the task's own generator. Never name a training file here:
    the accuracy would be of samples the model has seen."""
    dataset: str | None = knob(None, path(), reaches("code"))
    """A function of your own that reads those files, as file.py:rows; `def rows(files)` gives dicts of columns. Set it
    when rows need code to be read. Null reads the files as they are."""
    images_from: str | None = knob(
        None, only("data.train_files", "*"), also("data.eval_files", "*"), reaches("files", None)
    )
    """A folder or a .tar in which the images that rows name by path are looked for; a tar is read where it lies. Set it
    when they do not lie beside the data file; a row's own column `images_from` takes precedence."""
    prompt_key: str = knob("prompt", harmless())
    """The column that holds the messages. Set it when your files call it something else."""
    default_source: str | None = knob(None, harmless())
    """The data source of rows in files that have no column data_source; scorers are chosen and
    reports are divided by it. Null refuses such rows."""
    max_prompt_tokens: int = knob(1024, at_least(1), only_engines("renders"))
    """Longer first prompts, tools included, are handled by `data.overlong`. Raise it when `turnwise check` counts many
    left out and the model's context has room."""
    overlong: Overlong = knob(Overlong.filter, only_engines("renders"))
    """What happens to prompts that are too long. Take `error` when no row of the data may be missing."""

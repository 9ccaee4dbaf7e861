"""What a program gave a training run beyond its config: recorded, so that the run is not resumed without it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import ConfigError, DataError, StorageError
from turnwise.storage.run_dir import RunDir

GIVEN = "given.json"
SAMPLES = (TRAINING, EVALUATION) = ("samples", "eval_samples")


def describe(**arguments: Any) -> dict[str, str]:
    """The arguments that are not None, each by a name that can be compared."""
    return {
        key: f"{len(value)}" if key in SAMPLES else _named(value)
        for key, value in arguments.items()
        if value is not None
    }


def check_given(run: RunDir | None, parts: Mapping[str, str], *, eval_files: Sequence[str]) -> None:
    """Refuse a training without held-out samples, and resuming a run with other parts than it began with."""
    if TRAINING in parts and EVALUATION not in parts and not eval_files:
        raise DataError("samples are given for training only: give eval_samples too, or set data.eval_files")
    if run is None:
        return
    before = _recorded(run)
    if _comparable(before) != _comparable(parts):
        was = ", ".join(f"{key}={value}" for key, value in before.items()) or "nothing"
        now = ", ".join(f"{key}={value}" for key, value in parts.items()) or "nothing"
        raise ConfigError(
            f"run {run.name!r} was given {was} by the program that began it, and now {now}: resume it in Python, with "
            "turnwise.train(config, ...) and the same arguments"
            if before
            else f"run {run.name!r} was started without Python arguments and is now given {now}: resume it without them"
        )


def write_given(run: RunDir, parts: Mapping[str, str]) -> None:
    """Keep what a new run was given."""
    if parts:
        run.write_json(GIVEN, dict(parts))


def resume_call(name: str, run: RunDir) -> str | None:
    """How a run that was given something is resumed; None for one that was not."""
    if not (parts := _recorded(run)):
        return None
    arguments = ", ".join(f"{key}=..." for key in parts)
    return f'turnwise.train(turnwise.configure(..., "run={name}", "resume=auto"), {arguments})'


def _recorded(run: RunDir) -> dict[str, str]:
    if not (run.path / GIVEN).is_file():
        return {}
    try:
        parts = json.loads(run.read_text(GIVEN))
    except json.JSONDecodeError as error:
        raise StorageError(f"{run.path / GIVEN}: not valid JSON: {error}") from error
    if not isinstance(parts, dict) or not all(isinstance(value, str) for value in parts.values()):
        raise StorageError(f"{run.path / GIVEN}: expected texts by name")
    return parts


def _comparable(parts: Mapping[str, str]) -> dict[str, str]:
    """Other samples to evaluate on do not make another run; those to train on are compared by the loader, by id."""
    return {key: "" if key in SAMPLES else value for key, value in parts.items()}


def _named(value: Any) -> str:
    if isinstance(value, list | tuple):
        names = [
            str(getattr(entry, "name", None) or getattr(entry, "__qualname__", type(entry).__name__)) for entry in value
        ]
        return ", ".join(names)
    return str(getattr(value, "__qualname__", type(value).__qualname__))

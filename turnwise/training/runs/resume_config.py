"""Resuming a run: whose config it is, and what of it may be changed. Imports no torch."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.config import Config
from turnwise.config.choices import Decay, Resume
from turnwise.config.sections import knob_for
from turnwise.errors import ConfigError
from turnwise.storage.lock import LOCK
from turnwise.storage.run_dir import CONFIG, RunDir, check_free, check_name
from turnwise.storage.status import read_status
from turnwise.training.runs.python_arguments import resume_call

if TYPE_CHECKING:
    from turnwise.config.compose import Composed

NEVER_CHANGES = {"train": (), "sft": ("sft.",)}
"""Of what may change, what is another run's for one command: a fine-tuning's learning rate falls until sft.steps."""
_WHERE = ("run", "runs_dir", "resume")
_NOT_TEXT = ("null", "true", "false", "nan", "inf")


def compose_training(overrides: Sequence[str], config_file: Path | None, *, trusted: bool) -> "Composed":
    """The config of a command that trains. A run that is resumed has its own; only what is given now differs.

    Plug-ins, addresses and the like that only the run names are refused unless it is `trusted`. Where the run lies is
    never the run's to say.
    """
    from turnwise.data.task_config import compose
    from turnwise.training.runs.trust import check_run, check_trust

    fresh = compose(overrides, config_file)
    recorded = _folder(fresh.config) / CONFIG if _asks_to_resume(fresh.config) else None
    if recorded is None or not recorded.is_file():
        return fresh
    directory = RunDir(recorded.parent)
    check_run(directory, trusted=trusted)
    composed = compose(overrides, config_file, recorded=recorded)
    config = replace(composed.config, **{key: getattr(fresh.config, key) for key in _WHERE})
    check_trust(directory, config, fresh.config, trusted=trusted)
    return replace(composed, config=config)


def resume_command(name: str, config: Config, command: str = "train") -> str:
    """The command that resumes a run made here; the run has its own config."""
    from turnwise.training.runs.trust import FLAG, needs_trust

    run = RunDir(Path.cwd() / config.runs_dir / name)
    if (call := resume_call(name, run)) is not None:
        return call
    location = [] if config.runs_dir == Config.runs_dir else [f"runs_dir={_quoted(config.runs_dir)}"]
    trust = [FLAG] if needs_trust(config, run) else []
    return shlex.join(["turnwise", command, f"run={_quoted(name)}", *location, "resume=auto", *trust])


def _quoted(text: str) -> str:
    """A value as an override takes it: in quotes where it has more than plain letters."""
    if re.fullmatch(r"[A-Za-z_/][A-Za-z0-9_./-]*", text) and text.lower() not in _NOT_TEXT:
        return text
    escaped = re.sub(r"(\\*)'", r"\1\1\'", text)  # backslashes count only before a quote
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def existing_run(config: Config, command: str) -> RunDir | None:
    """The run to resume, or None for a new one; a folder that is neither is refused before anything is tried out."""
    if not _asks_to_resume(config):
        check_free(Path(config.runs_dir), config.run)
        return None
    folder = _folder(config)
    if not folder.exists():
        return None
    if folder.is_dir() and {entry.name for entry in folder.iterdir()} <= {LOCK}:  # of a process that was killed at once
        return RunDir(folder)
    run = RunDir.open(folder)
    status = read_status(run)
    if status is not None and status.command != command:
        raise ConfigError(
            f"run {run.name!r} was made by `turnwise {status.command}`: `turnwise {command}` cannot resume it"
        )
    return run


def changed_settings(directory: RunDir, config: Config) -> dict[str, tuple[Any, Any]]:
    """What differs from the recorded config: {key: (then, now)}."""
    from turnwise.data.task_config import differences

    changes = differences(directory.path / CONFIG, config)
    return {key: pair for key, pair in changes.items() if key not in _WHERE}


def refuse_changes(directory: RunDir, config: Config, command: str) -> None:
    """ConfigError for a config with which the run would be another one."""
    changes = changed_settings(directory, config)
    fixed = NEVER_CHANGES[command]
    changed = {key: pair for key, pair in changes.items() if key.startswith(fixed) or not _may_change(key)}
    if command == "train" and "training.steps" in changes and config.learner.decay is not Decay.constant:
        changed["training.steps"] = changes["training.steps"]
    if changed:
        listed = "; ".join(f"{key} was {then!r} and is {now!r}" for key, (then, now) in changed.items())
        raise ConfigError(f"run {directory.name!r} cannot be resumed with another config: {listed}")


def _may_change(key: str) -> bool:
    return (knob := knob_for(key)) is not None and "may_change" in knob.marks


def _asks_to_resume(config: Config) -> bool:
    return config.run is not None and config.resume is Resume.auto


def _folder(config: Config) -> Path:
    name = str(config.run)
    check_name(name)
    return Path.cwd() / config.runs_dir / name

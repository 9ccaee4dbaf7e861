"""The config of a command, with what its task sets below what the user does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.config import Config
from turnwise.config.compose import Composed, compose_with, flat
from turnwise.data.task import config_values
from turnwise.errors import ConfigError


def compose(
    overrides: Sequence[str] = (), config_file: Path | None = None, *, recorded: Path | None = None
) -> Composed:
    """The config of a command. Every mistake is a ConfigError with the nearest valid name; torch is not imported.

    `recorded` is the config of a run that is resumed: what is not set anew stays as it was there.
    """
    return compose_with(config_values, overrides, config_file, recorded=recorded)


def configure(*overrides: str, config_file: str | Path | None = None) -> Config:
    """The Config of key=value overrides, for Python: `configure("task=null", "sampling.temperature=0")`."""
    if not isinstance(config_file, str | Path | None):
        raise ConfigError(f"config_file is a path, not {config_file!r}")
    return compose(overrides, None if config_file is None else Path(config_file)).config


def differences(config_file: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose value in a recorded config is another than now: {key: (then, now)}."""
    then, now = flat(compose([], recorded=config_file).config), flat(config)
    return {key: (then[key], now[key]) for key in now if then[key] != now[key]}

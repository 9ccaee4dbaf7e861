"""The config of a command, with what its task sets below what the user does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.config import Config
from turnwise.config.compose import PROGRAM, Composed, compose_with, flat
from turnwise.config.trees import flatten, nest, over
from turnwise.data.task import config_values
from turnwise.errors import ConfigError


def compose(
    overrides: Sequence[str] = (),
    config_file: Path | None = None,
    *,
    recorded: Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> Composed:
    """The config of a command. Every mistake is a ConfigError with the nearest valid name; torch is not imported.

    `recorded` is the config of a run that is resumed: what is not set anew stays as it was there. `values` is a
    tree that a program gives beside the overrides.
    """
    return compose_with(config_values, overrides, config_file, recorded=recorded, values=values)


def configure(*overrides: str | Mapping[str, Any], config_file: str | Path | None = None, **sections: Any) -> Config:
    """The Config of what is set, for Python; every way of saying it may be mixed with the others.

    `configure("task=null", "training.steps=2")`, `configure({"training": {"steps": 2}})`,
    `configure(task=None, training={"steps": 2})`.
    """
    if not isinstance(config_file, str | Path | None):
        raise ConfigError(f"config_file is a path, not {config_file!r}")
    texts = [value for value in overrides if not isinstance(value, Mapping)]
    values = nest(sections, PROGRAM)
    for tree in (value for value in overrides if isinstance(value, Mapping)):
        tree = nest(tree, PROGRAM)
        if twice := sorted(flatten(values).keys() & flatten(tree).keys()):
            raise ConfigError(f"{PROGRAM}: {twice[0]} is given twice")
        values = over(values, tree)
    return compose(texts, None if config_file is None else Path(config_file), values=values).config


def differences(config_file: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose value in a recorded config is another than now: {key: (then, now)}."""
    then, now = flat(compose([], recorded=config_file).config), flat(config)
    return {key: (then[key], now[key]) for key in now if then[key] != now[key]}

"""The variables of wandb: what a run takes from them, what it decides itself, and what is refused before it starts."""

import os
from collections.abc import Iterator

from turnwise.config import Config
from turnwise.config.environment import Use, is_address, value
from turnwise.config.sections import value_of
from turnwise.errors import ConfigError
from turnwise.errors.address_passwords import without_userinfo
from turnwise.errors.nearest_name import unknown

PROJECT, ENTITY, KEY, MODE, ADDRESS = (
    "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL",
)  # fmt: skip
_OURS = {
    "WANDB_DIR": "its files lie in the run's folder",
    "WANDB_NAME": "a run is called as its folder is",
    "WANDB_RUN_ID": "the run's folder has its id",
    "WANDB_RESUME": "a run is resumed with resume=auto",
    "WANDB_SILENT": "it never prints",
}
"""Variables that a run decides itself, and how."""
_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
_NOT_IN_NAMES = "/\\#?%:"


def fill_in(config: Config) -> Iterator[tuple[str, str, str]]:
    """The project, where wandb is a tracker."""
    if _tracks(config):
        _check_wandb()
        if (project := value(PROJECT)) is not None:
            yield "trackers.project", project, PROJECT


def use(name: str, config: Config) -> Use:
    """What a variable of wandb does; a secret is not shown."""
    text = " ".join(os.environ[name].split())  # notes may have several lines
    secret = any(word in name for word in ("KEY", "TOKEN", "SECRET"))
    printable = "".join(character for character in text[:200] if character.isprintable())
    visible = "(secret)" if secret else without_userinfo(printable)
    if not _tracks(config):
        return Use(name, visible, "not used, tracking.to has no wandb", used=False)
    if name in _OURS:
        return Use(name, visible, f"not used: {_OURS[name]}", used=False)
    if name == PROJECT:
        project = value_of(config, "trackers.project")
        effect = "trackers.project" if project == text else f"not used, trackers.project={project} was given"
        return Use(name, visible, effect, project == text)
    return Use(name, visible, "read by wandb")


def _check_wandb() -> None:
    """What wandb would refuse when the run has begun."""
    for name in (PROJECT, ENTITY):
        if (text := value(name)) is not None and (
            any(character in _NOT_IN_NAMES for character in text) or len(text) > 128
        ):
            raise ConfigError(f"{name}={text[:80]}: a name of at most 128 characters without any of {_NOT_IN_NAMES}")
    if (mode := value(MODE)) is not None and mode not in _MODES:
        raise ConfigError(f"{MODE}: {unknown('mode', mode, _MODES)}")
    if (address := value(ADDRESS)) is not None and not is_address(address):
        raise ConfigError(
            f"{ADDRESS}={without_userinfo(address, alone=True)}: an address is like https://wandb.example.com"
        )
    if (key := value(KEY)) is not None and (not key.isascii() or " " in key):
        raise ConfigError(f"{KEY} has characters that no key has")


def _tracks(config: Config) -> bool:
    return "wandb" in config.tracking.to

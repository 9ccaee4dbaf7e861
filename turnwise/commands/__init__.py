"""The verbs of the command line, one file each with HELP, add_arguments and run; what several of them share is here."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.config.compose import Composed


def add_config(parser: argparse.ArgumentParser) -> None:
    """The arguments of a verb that takes a config."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="config values, such as seed=1; `turnwise config` lists them"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of config values")


def add_json(parser: argparse.ArgumentParser) -> None:
    """For programs that read the result."""
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """For a verb that runs what a recorded config names."""
    parser.add_argument(
        "--trust-run",
        action="store_true",
        help="let the run's own config import code, contact addresses and open files; only for runs that you trust",
    )


def refuse_unread(composed: "Composed") -> None:
    """A key that was set and has no effect is a mistake."""
    from turnwise.config.compose import unread

    problems = unread(composed)
    if problems:
        raise ConfigError("; ".join(problems))

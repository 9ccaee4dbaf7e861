"""`turnwise rescore RUN`: score what a run recorded again, without a model, and show what would change."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.commands import add_trust
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.config import Config

HELP = "score a recorded run again, with another scorer, options or weights, and show what would change"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="config values, such as scoring.options.gsm8k.wrong=-0.1",
    )
    parser.add_argument("--scorer", default=None, help="score everything with this one (default: as the run did)")
    parser.add_argument(
        "--options", nargs="+", default=[], metavar="NAME=VALUE", help="options of that scorer, such as view=full_trace"
    )
    parser.add_argument(
        "--weights", nargs="+", default=[], metavar="PART=NUMBER", help="weights of the parts, such as acc=1 tool=0.2"
    )
    add_trust(parser)
    parser.add_argument("--name", default=None, help="folder for the result, under RUN/rescored (default: numbered)")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object in the last line")


def run(args: argparse.Namespace) -> int:
    """What the run recorded stays as it is; the result goes beside it."""
    from dataclasses import replace

    from rich.console import Console

    from turnwise.config.sections import to_yaml
    from turnwise.data.task_config import compose
    from turnwise.reports.rescore import rescore_run, with_scorer
    from turnwise.storage.lock import holding
    from turnwise.storage.run_dir import RESCORED, RunDir
    from turnwise.system.stopping import run_stoppable
    from turnwise.training.runs.trust import check_run, check_trust

    if args.options and args.scorer is None:
        raise ConfigError("--options belong to the scorer that --scorer names; those of others are scoring.options")
    directory = RunDir.open(args.run_dir)
    check_run(directory, trusted=args.trust_run)
    recorded_file = directory.path / "config.yaml"
    recorded = compose([], recorded=recorded_file).config
    composed = compose([*args.overrides, *map(weight, args.weights)], recorded=recorded_file).config
    scoring = with_scorer(recorded.scoring, composed.scoring, args.scorer)
    if args.options:
        options = {**scoring.options.get(args.scorer, {}), **dict(map(option, args.options))}
        scoring = replace(scoring, options={args.scorer: options})
    config = replace(composed, scoring=scoring)
    check_trust(directory, config, _without_run(args), trusted=args.trust_run, section="scoring.")
    out = Console()
    with holding(directory.path / RESCORED, "rescore", lambda text: out.print(text, markup=False, soft_wrap=True)):
        name = args.name or _free_name(directory.path / RESCORED, args.scorer or "own")
        rescored = run_stoppable(rescore_run(directory, config, name))
        directory.write_text(f"{RESCORED}/{name}/config.yaml", to_yaml(config))
    for table in rescored.tables():
        out.print(table)
    out.print(f"written: {directory.path / RESCORED / name}", soft_wrap=True, highlight=False, markup=False)
    if args.json:
        sys.stdout.write(json.dumps(rescored.summary()) + "\n")
    return 0


def _without_run(args: argparse.Namespace) -> "Config":
    """The config of this command line alone, without the run."""
    from dataclasses import replace

    from turnwise.data.task_config import compose

    config = compose(args.overrides).config
    if args.scorer is None:
        return config
    options = {**config.scoring.options, args.scorer: dict(map(option, args.options))}
    scoring = replace(config.scoring, scorers={**config.scoring.scorers, "default": args.scorer}, options=options)
    return replace(config, scoring=scoring)


def weight(text: str) -> str:
    """`tool=0.2` as an override of the config."""
    part, sign, value = text.partition("=")
    try:
        float(value)
    except ValueError:
        sign = ""
    if not sign or not part:
        raise ConfigError(f"--weights {text!r}: write PART=NUMBER, such as tool=0.2")
    return f"scoring.weights.{part}={value}"


def option(text: str) -> tuple[str, Any]:
    """`view=full_trace` by name and value; values are YAML, as in a config file."""
    from turnwise.config.strict_yaml import parse_yaml

    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ConfigError(f"--options {text!r}: write NAME=VALUE, such as view=full_trace")
    try:
        return name, parse_yaml(value)
    except ConfigError as error:
        raise ConfigError(f"--options {text!r}: {error}") from error


def _free_name(folder: Path, scorer: str) -> str:
    plain = "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in scorer).strip("_-")
    number = 1
    while (folder / f"{plain}-{number}").exists():
        number += 1
    return f"{plain}-{number}"

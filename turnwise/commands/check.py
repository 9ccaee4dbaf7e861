"""`turnwise check`: what differs from the defaults, the plan, and all that can go wrong, tried without a model."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.commands import add_config, add_json
from turnwise.errors import ConfigError
from turnwise.extensions import named

if TYPE_CHECKING:
    from turnwise.config.compose import Composed
    from turnwise.reports.preflight import Report

HELP = "check config, data, template, tools and scorers, load no model; `check sandbox` tests the sandbox"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)
    parser.add_argument(
        "--all", action="store_true", help="show every key, not only those that differ from the defaults"
    )
    for name in named("configs"):
        text = f"translate a {name} config: a YAML file, or the script with its arguments ('run.sh 8 out')"
        parser.add_argument(f"--from-{name}", type=Path, metavar="FILE", help=text)
    parser.epilog = """\
examples:
  turnwise check data.eval_files=test.parquet    lint the rows, try template, tools and scorers
  turnwise check --config mine.yaml --all        every key with its value and where it is from
  turnwise check sandbox                         attack the sandbox and show what holds

The exit code is 0 when all checks passed, 1 when one failed, 2 when the config cannot be used.
"""


def run(args: argparse.Namespace) -> int:
    """An exit code for CI: 1 when a check failed."""
    if args.overrides and "=" not in args.overrides[0]:
        return _check_extension(args.overrides.pop(0), args)
    from turnwise.config.sections import flat
    from turnwise.reports.preflight import preflight

    composed = _composed(args)
    report = preflight(composed)
    _print(composed, report, every_key=args.all)
    if args.json:
        findings = [{"check": f.check, "outcome": f.outcome.value, "text": f.text} for f in report.findings]
        config = {k: {"value": value, "from": composed.origins[k]} for k, value in flat(composed.config).items()}
        memory = None if report.memory is None else report.memory.as_json()
        summary = {"passed": report.passed, "findings": findings, "config": config, "memory": memory}
        sys.stdout.write(json.dumps(summary) + "\n")
    return 0 if report.passed else 1


def _composed(args: argparse.Namespace) -> "Composed":
    """The config of the command, or one of another system as ours."""
    from turnwise.data.task_config import compose
    from turnwise.system.plugins import load

    for name, spec in named("configs").items():
        if (file := getattr(args, f"from_{name}")) is not None:
            if args.config is not None:
                raise ConfigError(f"--from-{name} and --config are two configs: give one")
            composed: Composed = load(spec, "config")(file, args.overrides)
            return composed
    return compose(args.overrides, args.config)


def _check_extension(name: str, args: argparse.Namespace) -> int:
    """What an extension says of itself on this machine."""
    from turnwise.data.task_config import compose
    from turnwise.errors.nearest_name import unknown
    from turnwise.system.plugins import load

    checks = named("checks")
    if name not in checks:
        raise ConfigError(f"{unknown('check', name, checks)} Config values are written key=value.")
    text, facts = load(checks[name], "check")(compose(args.overrides, args.config).config)
    sys.stdout.write(text + "\n")
    if args.json:
        sys.stdout.write(json.dumps(facts) + "\n")
    return 0


def _print(composed: "Composed", report: "Report", *, every_key: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from turnwise.config import Config
    from turnwise.config.docs import shown
    from turnwise.config.sections import flat

    out, defaults = Console(), flat(Config())
    values = flat(composed.config)
    chosen = [key for key in values if every_key or values[key] != defaults[key]]
    if not every_key:  # what a person said comes before what the task brings
        chosen.sort(key=lambda key: composed.origins[key].startswith("task "))
    if chosen:
        table = Table(title="every key" if every_key else "what differs from the defaults", show_edge=False)
        table.add_column("key", no_wrap=True)
        for column in ("value", "default", "from"):
            table.add_column(column, overflow="fold")
        for key in chosen:
            differs = values[key] != defaults[key]
            style = "bold" if differs and every_key else ""
            default = shown(defaults[key]) if differs else ""
            table.add_row(Text(key, style), Text(shown(values[key])), Text(default, "dim"), composed.origins[key])
        out.print(table)
    if not every_key:
        rest = len(values) - len(chosen)
        out.print(f"{rest} keys have their defaults; --all shows them, `turnwise config KEY` explains one", style="dim")
    if report.plan:
        out.rule("plan")
        out.print(report.plan, markup=False, highlight=False)
    out.rule("checks")
    colours = {"ok": "green", "warning": "yellow", "error": "bold red"}
    for finding in report.findings:
        out.print(Text.assemble((f"{finding.outcome:8}", colours[finding.outcome]), f"{finding.check}: {finding.text}"))
    out.print("passed" if report.passed else "failed", style="green" if report.passed else "bold red")

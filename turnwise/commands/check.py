"""`turnwise check`: what differs from the defaults, the plan, and all that can go wrong, tried without a model."""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.commands import add_config, add_json

if TYPE_CHECKING:
    from turnwise.compose import Composed
    from turnwise.preflight import Report

HELP = "try everything that can go wrong, load no model; `check sandbox` attacks the sandbox"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)
    parser.add_argument(
        "--all", action="store_true", help="show every key, not only those that differ from the defaults"
    )
    parser.add_argument(
        "--from-verl",
        type=Path,
        metavar="FILE",
        help="a config of verl's, YAML or the script that runs it ('run.sh 8 out' with its words): print ours",
    )
    parser.epilog = """\
examples:
  turnwise check data.eval_files=test.parquet    lint the rows, try template, tools and scorers
  turnwise check --config mine.yaml --all        every key with its value and where it is from
  turnwise check --from-verl config.yaml         verl's config as ours, each key's fate, then the checks
  turnwise check sandbox                         attack the sandbox and show what holds

The exit code is 0 when all checks passed, 1 when one failed, 2 when the config cannot be used.
"""


def run(args: argparse.Namespace) -> int:
    """An exit code for CI: 1 when a check failed."""
    if args.overrides[:1] == ["sandbox"]:
        del args.overrides[0]
        return _check_sandbox(args)
    from turnwise.compose import compose, flat

    composed = compose(args.overrides, args.config) if args.from_verl is None else _translated(args)
    from turnwise.preflight import preflight

    report = preflight(composed)
    _print(composed, report, every_key=args.all)
    if args.json:
        findings = [{"check": f.check, "outcome": f.outcome.value, "text": f.text} for f in report.findings]
        config = {k: {"value": value, "from": composed.origins[k]} for k, value in flat(composed.config).items()}
        memory = None if report.memory is None else report.memory.as_json()
        found = {"passed": report.passed, "findings": findings, "config": config, "memory": memory}
        sys.stdout.write(json.dumps(found) + "\n")
    return 0 if report.passed else 1


def _translated(args: argparse.Namespace) -> "Composed":
    """verl's config as ours, shown; what is given on the command line stands over it."""
    from turnwise.addresses import without_userinfo
    from turnwise.compat.verl_config import Kind, translate
    from turnwise.compose import compose, other_names
    from turnwise.errors import ConfigError
    from turnwise.storage.transcript import visible
    from turnwise.strict_yaml import write_yaml

    if args.config is not None:
        raise ConfigError("--from-verl and --config are two configs: give one")
    found = translate(args.from_verl, other_names())
    for note in found.notes:
        sys.stdout.write(f"# {visible(' '.join(note.split()))}\n")
    for kind in Kind:
        entries = [fate for fate in found.fates if fate.kind is kind]
        sys.stdout.write(f"# {kind.value}: {len(entries)} keys\n")
        for fate in entries:
            said = f"{fate.key}={without_userinfo(str(fate.value))[:60]}: {fate.text}"
            sys.stdout.write(f"#   {visible(' '.join(said.split()))}\n")  # a line break would end the comment
    text = write_yaml(found.tree())
    sys.stdout.write(f"{without_userinfo(text)}\n")
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder, "config.yaml")
        ours.write_text(text, encoding="utf-8")
        composed = compose(args.overrides, ours)
    named = {key: str(args.from_verl) if origin == str(ours) else origin for key, origin in composed.origins.items()}
    return dataclasses.replace(composed, origins=named)


def _check_sandbox(args: argparse.Namespace) -> int:
    """What the sandbox is worth here: every attack of the probe and how it went."""
    from turnwise.compose import compose
    from turnwise.errors import ConfigError
    from turnwise.sandbox.opening import open_pool
    from turnwise.sandbox.process import SandboxUnavailable
    from turnwise.sandbox.swe_remote import open_place
    from turnwise.stopping import run_stoppable

    config = compose(args.overrides, args.config).config

    async def probe() -> tuple[str, str]:
        async with open_pool(config.sandbox) as pool:
            if pool.report is None:
                raise ConfigError(f"{config.sandbox.url} does not say what it proved")
            return pool.report.level.name, f"{pool.report.text()}\n{await shells()}"

    async def shells() -> str:
        """What was proven of shell sessions, or why there are none; Python sessions do not need them."""
        try:
            async with open_place(config.sandbox) as place:
                return "shell sessions" if place.report is None else f"shell sessions: {place.report.text()}"
        except SandboxUnavailable as error:
            return f"no shell sessions: {error}"

    level, text = run_stoppable(probe())
    sys.stdout.write(text + "\n")
    if args.json:
        sys.stdout.write(json.dumps({"level": level, "report": text.splitlines()}) + "\n")
    return 0


def _print(composed: "Composed", report: "Report", *, every_key: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from turnwise.compose import flat
    from turnwise.config import Config
    from turnwise.config_docs import shown

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

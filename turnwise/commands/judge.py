"""`turnwise judge check`: is each endpoint of the judge there, which model answers, how fast, and is it any good."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.scoring.judge.probe import EndpointReport

HELP = "probe the judge's endpoints: reachable, model, latency, known verdicts, determinism"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="check: ask each endpoint a few things with known answers")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="config values, such as scoring.options.judge.base_urls=[http://127.0.0.1:18901/v1]",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of config values")
    parser.add_argument("--scorer", default="judge", help="whose options to use (default judge)")


def run(args: argparse.Namespace) -> int:
    """0 when every endpoint can be used and judges rightly, else 1."""
    import asyncio

    from rich.console import Console

    from turnwise.compose import compose
    from turnwise.scoring.judge.probe import probe_all, settings_in

    options = compose(args.overrides, args.config).config.scoring.options.get(args.scorer) or {}
    settings = settings_in(options)
    reports = asyncio.run(probe_all(settings))
    out = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    for report in reports:
        _show(out, report)
    models = {report.model for report in reports if report.model is not None}
    if len(models) > 1:
        out.print(f"the endpoints serve different models ({', '.join(sorted(models))}): only one of them will be used")
    return 0 if all(report.is_good for report in reports) and len(models) == 1 else 1


def _show(out: "Console", report: "EndpointReport") -> None:
    out.print(report.text(), markup=False)


if TYPE_CHECKING:
    from rich.console import Console

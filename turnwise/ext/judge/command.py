"""`turnwise judge check`: is each endpoint of the judge there, which model answers, how fast, and is it any good."""

import argparse
import sys
from pathlib import Path

GROUP = "services"
HELP = "probe the judge's endpoints: reachable, model, latency, known verdicts, determinism"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="check: ask each endpoint a few things with known answers")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="config values, such as scoring.options.judge.base_urls=[http://127.0.0.1:18901/v1]",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of config values")
    parser.add_argument("--scorer", default="judge", help="whose options to use (default judge)")


def run(args: argparse.Namespace) -> int:
    """0 when every endpoint serves the same model and passes, else 1."""
    import asyncio

    from turnwise.data.task_config import compose
    from turnwise.ext.judge.endpoint_check import probe_all, settings_in
    from turnwise.scoring.scorer import ScorerSpec

    options = compose(args.overrides, args.config).config.scoring.options.get(args.scorer) or {}
    ScorerSpec(args.scorer, dict(options)).make()  # a misspelt option is found here as it is by a run
    reports = asyncio.run(probe_all(settings_in(options)))
    for report in reports:
        sys.stdout.write(report.text() + "\n")
    models = sorted({report.model for report in reports if report.model is not None})
    if len(models) > 1:
        sys.stdout.write(f"the endpoints serve different models, of which a run uses one: {', '.join(models)}\n")
    return 0 if len(models) == 1 and all(report.is_good for report in reports) else 1

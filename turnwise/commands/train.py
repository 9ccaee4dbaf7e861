"""`turnwise train`: reinforcement learning with checkpoints, then an evaluation."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from turnwise.commands import add_config, add_json, refuse_unread

if TYPE_CHECKING:
    from turnwise.config import Config

HELP = "train with reinforcement learning, then evaluate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)
    parser.add_argument(
        "--trust-run", action="store_true", help="resume=auto: let the run's config import code and open addresses"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan, the memory and an estimate of the time; write nothing"
    )
    parser.epilog = """\
examples:
  turnwise train run=first board.live=true                   with a live board
  turnwise train profile=laptop --dry-run                    what it would take here
  turnwise train run=first resume=auto training.steps=100    resume it, and go further
  turnwise train model.path=FOLDER data.train_files=train.parquet data.eval_files=test.parquet
  turnwise train algorithm.advantage=gae training.max_lag=1 learner.lora_rank=16
"""


def run(args: argparse.Namespace) -> int:
    """A run that is resumed has its own config; only what is given anew differs."""
    from turnwise.training.runs.resume_config import compose_training

    composed = compose_training(args.overrides, args.config, trusted=args.trust_run)
    refuse_unread(composed)
    from rich.console import Console

    if args.dry_run:
        return _dry_run(composed.config, json_too=args.json)
    from turnwise.train import train

    report = train(composed.config)
    Console().print(report, highlight=False, soft_wrap=True)
    if args.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    return 0


def _dry_run(config: "Config", *, json_too: bool) -> int:
    """What would be done, and how long it would take."""
    from rich.console import Console

    from turnwise.reports.dry_run import dry_run
    from turnwise.system.stopping import run_stoppable
    from turnwise.training.runs.run import printer

    report = run_stoppable(dry_run(config, printer(Console(stderr=True))))
    sys.stdout.write(report.text())
    if json_too:
        sys.stdout.write(json.dumps(report.as_json) + "\n")
    return 0

"""`turnwise train`: reinforcement learning with checkpoints, then an evaluation."""

import argparse
import json
import sys

from turnwise.commands import add_config, add_json, refuse_unread

HELP = "train with reinforcement learning, then evaluate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)
    parser.add_argument(
        "--trust-run", action="store_true", help="resume=auto: import and reach what only the run's own config names"
    )


def run(args: argparse.Namespace) -> int:
    """A run that goes on has its own config; only what is given anew differs."""
    from turnwise.trainer.resuming import compose_training

    composed = compose_training(args.overrides, args.config, trusted=args.trust_run)
    refuse_unread(composed)
    from rich.console import Console

    from turnwise.train import train

    report = train(composed.config)
    Console().print(report, highlight=False, soft_wrap=True)
    if args.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    return 0

"""`turnwise sft`: fine-tune a model on scripted or recorded trajectories."""

import argparse
import sys

from turnwise.commands import add_config, refuse_unread

HELP = "fine-tune a model on scripted or recorded trajectories"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.epilog = """\
examples:
  turnwise sft                                                      scripted episodes of the task
  turnwise sft sft.recorded=[runs/first/trajectories/step_000010.parquet] sft.min_reward=1
"""


def run(args: argparse.Namespace) -> int:
    """The trained model goes to the folder `sft.out`."""
    from turnwise.compose import compose

    composed = compose(args.overrides, args.config)
    refuse_unread(composed)
    from turnwise.sft import run_sft

    folder = run_sft(composed.config)
    sys.stdout.write(f"model: {folder}\n")
    return 0

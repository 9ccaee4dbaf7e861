"""`turnwise sft`: fine-tune a model on scripted or recorded trajectories."""

import argparse
import json
import sys

from turnwise.commands import add_config, add_json, refuse_unread

HELP = "fine-tune a model on scripted or recorded trajectories"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)
    parser.epilog = """\
examples:
  turnwise sft                                                      scripted episodes of the task
  turnwise sft sft.recorded=[runs/first] sft.min_reward=1           the good episodes of a training run
  turnwise train model.path=runs/SFT_RUN/policy                     reinforcement learning from there
"""


def run(args: argparse.Namespace) -> int:
    """The trained model is the folder `policy` of a new run."""
    from turnwise.compose import compose

    composed = compose(args.overrides, args.config)
    refuse_unread(composed)
    from rich.console import Console

    from turnwise.sft import fine_tune

    out = Console()
    report = fine_tune(composed.config)
    out.print(report.table())
    out.print(f"policy: {report.policy}", soft_wrap=True, highlight=False, markup=False)
    if args.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    return 0

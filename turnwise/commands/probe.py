"""`turnwise probe`: whether answers rest on what tools showed: accuracy with their images as they are, and spoilt."""

import argparse
import json
import sys

from turnwise.commands import add_config, add_json, refuse_unread

HELP = "evaluate with the tools' images blanked, swapped or noised, to test if the model uses them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)
    parser.add_argument(
        "--with", dest="probes", default="blank,swap,noise", metavar="PROBES",
        help="which probes, each one pass over the samples: blank, swap, noise (default all three)",
    )  # fmt: skip
    parser.epilog = """\
examples:
  turnwise probe task=tinylook model.path=tiny_vision eval.samples=200
  turnwise probe task=tinylook model.path=runs/NAME/checkpoints/step_000040/policy
  turnwise probe --config runs/NAME/config.yaml eval.samples=100 --with blank,swap
"""


def run(args: argparse.Namespace) -> int:
    """The result goes to a new run directory and to the terminal."""
    from turnwise.data.task_config import compose
    from turnwise.rollout.image_ablations import read_probes

    probes = read_probes(args.probes)
    composed = compose(args.overrides, args.config)
    refuse_unread(composed)
    from rich.console import Console

    from turnwise.reports.probe import probe_model

    report = probe_model(composed.config, probes)
    Console().print(report, highlight=False, soft_wrap=True)
    if args.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    return 0

"""`turnwise eval`: roll out and score the evaluation samples."""

import argparse
import json
import sys
from pathlib import Path

from turnwise.commands import add_config, add_json, refuse_unread

HELP = "roll out and score the evaluation samples"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the episodes as readable JSONL")
    parser.add_argument("--no-transcript", action="store_true", help="leave out the example transcript")
    parser.epilog = """\
examples:
  turnwise eval                                                   the bundled model on the bundled task
  turnwise eval model.path=FOLDER data.eval_files=test.parquet    your model on your rows
  turnwise eval engine=openai engine.base_url=http://127.0.0.1:8000/v1 eval.group_size=4
  turnwise eval --config runs/NAME/config.yaml run=again          repeat a run
"""


def run(args: argparse.Namespace) -> int:
    """The result goes to a new run directory and to the terminal."""
    from turnwise.data.task_config import compose

    composed = compose(args.overrides, args.config)
    refuse_unread(composed)
    from rich.console import Console

    from turnwise.eval import evaluate
    from turnwise.storage.trajectories.files import write_jsonl
    from turnwise.storage.transcript import transcript
    from turnwise.system.files import check_place

    if args.out is not None:
        check_place(args.out, "--out")
    out = Console()
    report = evaluate(composed.config)
    if args.out is not None:
        write_jsonl(args.out, report.trajectories)
    if report.trajectories and not args.no_transcript:
        out.print(transcript(report.trajectories[0], None))
    out.print(report, highlight=False, soft_wrap=True)
    if args.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    return 0

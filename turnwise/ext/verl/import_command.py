"""`turnwise import-jsonl PATH... --out runs/NAME`: rollout dumps of verl or RL logging board as a run for the board."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from turnwise.errors import ConfigError
from turnwise.errors.nearest_name import unknown

GROUP = "after a run"
HELP = "make a run of the rollout dumps of verl (<step>.jsonl) or RL logging board (rollout_data_rank*.jsonl)"
FORMATS = ("auto", "verl", "rl_logging_board")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", type=Path, nargs="*", metavar="PATH", help="dump files, or folders of .jsonl files")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="the run to make, such as runs/imported")
    parser.add_argument("--format", default="auto", metavar="NAME", help=f"{', '.join(FORMATS)} (default auto)")
    parser.add_argument(
        "--eval", type=Path, nargs="+", default=[], metavar="PATH", help="validation dumps; they become evaluations"
    )
    parser.add_argument(
        "--images",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="copy images that rows name, from this folder",
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave bad lines out and count them")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    """Every line is checked before the run is made; an existing run is never touched."""
    if args.format not in FORMATS:
        raise ConfigError(unknown("format", args.format, FORMATS))
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from turnwise.ext.verl.dumps.read import import_dumps, summary
    from turnwise.ext.verl.dumps.rows import DumpFormat

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("check, then write", total=None)
        done = import_dumps(
            args.paths,
            args.out,
            evaluations=args.eval,
            form=DumpFormat(args.format),
            images=args.images,
            skip_bad=args.skip_bad,
            progress=lambda at, total: bar.update(task, completed=at, total=total),
        )
    sys.stdout.write(f"{summary(done)}run directory: {done.run}\n")
    if args.json:
        sys.stdout.write(json.dumps(asdict(done) | {"run": str(done.run)}) + "\n")
    return 0

"""`turnwise report RUN`: one run's board as a file to send or to keep; it needs no server and no network."""

import argparse
import sys
from pathlib import Path

from turnwise.errors import ConfigError

GROUP = "after a run"
HELP = "write one run's board into a single HTML file that opens anywhere, offline"
LARGE = 40_000_000
"""Bytes from which on a file is slow to open and rarely fits into a mail."""
MOST_NAMED = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default report.html")
    parser.add_argument("--trajectories", type=int, default=24, metavar="N", help="include at most N (default 24)")
    parser.add_argument(
        "--filter",
        default="",
        metavar="EXPR",
        help="the newest that pass, such as 'right == false' (default: best, worst, surprising, behind findings)",
    )
    parser.add_argument("--force", action="store_true", help="write over an existing file")
    parser.epilog = (
        "The file holds the run's config, plan, end of the log and all metrics: read it before you share it."
    )


def run(args: argparse.Namespace) -> int:
    """Nothing is written before everything was read."""
    from turnwise.ext.board.standalone_html import MOST_POSSIBLE, freeze
    from turnwise.system.files import replacing

    if not 0 <= args.trajectories <= MOST_POSSIBLE:
        raise ConfigError(f"--trajectories {args.trajectories}: between 0 and {MOST_POSSIBLE}")
    out: Path = args.out
    if out.is_dir():
        raise ConfigError(f"--out {out}: that is a folder; name a file in it")
    if out.exists() and not args.force:
        raise ConfigError(f"{out} exists; --force writes over it")
    report = freeze(args.run_dir, most=args.trajectories, filter=args.filter)
    with replacing(out) as file:
        file.write(report.content)
    size = len(report.content)
    for what in report.left_out[:MOST_NAMED]:
        sys.stderr.write(f"left out, since it cannot be read: {what}\n")
    if len(report.left_out) > MOST_NAMED:
        sys.stderr.write(f"and {len(report.left_out) - MOST_NAMED} more that cannot be read\n")
    if size > LARGE:
        sys.stderr.write(f"{out} has {size / 1e6:.0f} MB; a smaller --trajectories makes it smaller\n")
    sys.stdout.write(f"{out}: {size / 1e6:.1f} MB, {report.trajectories} trajectories\n")
    return 0

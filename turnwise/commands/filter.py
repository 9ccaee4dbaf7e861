"""`turnwise filter RUN --out FILE`: keep the samples that are neither too easy nor too hard, as measured."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from turnwise.types import Trajectory

HELP = "write the samples of recorded episodes that are not too easy and not too hard"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("places", type=Path, nargs="+", metavar="RUN|FILE", help="runs, or files of trajectories")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .parquet or .jsonl file to write")
    parser.add_argument("--max-accuracy", type=float, default=1.0, help="drop samples above this accuracy, such as 0.9")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="drop samples below this accuracy")
    parser.add_argument("--min-tries", type=int, default=1, help="keep samples with fewer tries (default 1)")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object in the last line")


def _episodes(files: Iterable[Path]) -> "Iterator[Trajectory]":
    """With the images of their samples: a row that names one of a run's folder would be nobody's row."""
    from turnwise.storage.images.copies import check_kept
    from turnwise.storage.images.reader import run_of
    from turnwise.storage.trajectories.files import read_trajectories

    for path in files:
        for trajectory in read_trajectories(path):
            sample_alone = replace(trajectory, messages=[], turns=[], branches=[])
            check_kept(run_of(path), sample_alone)
            yield sample_alone


def run(args: argparse.Namespace) -> int:
    """Rows are written as they were read; what was dropped is counted."""
    from turnwise.data.sample_to_row import to_values
    from turnwise.data.write import write_rows
    from turnwise.reports.filter import Sieve, measure, trajectory_files

    sieve = Sieve(args.min_accuracy, args.max_accuracy, args.min_tries)
    if args.out.exists():
        raise ConfigError(f"--out {args.out} exists; nothing is overwritten")
    files = trajectory_files(args.places)
    sorting = sieve.sort(measure(_episodes(files)))
    if not sorting.kept:
        raise DataError(
            f"nothing is left: {len(sorting.too_easy)} samples are too easy, {len(sorting.too_hard)} too hard"
        )
    write_rows((to_values(entry.sample) for entry in sorting.kept), args.out)
    counts = sorting.as_json()
    sys.stdout.write(
        f"read {len(files)} files; kept {counts['kept']} samples ({counts['unmeasured']} of them with fewer than "
        f"{args.min_tries} scored tries), dropped {counts['too_easy']} right in more than {args.max_accuracy:.0%} and "
        f"{counts['too_hard']} in less than {args.min_accuracy:.0%} of their tries\nwrote {args.out}\n"
    )
    if args.json:
        sys.stdout.write(json.dumps(counts | {"out": str(args.out)}) + "\n")
    return 0

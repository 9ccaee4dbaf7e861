"""`turnwise prepare DATASET`: train and test parquet files of a data set."""

import argparse
import sys
from pathlib import Path

from turnwise.errors import ConfigError, unknown

HELP = "make train and test parquet files of a data set"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="gsm8k or arithmetic")
    parser.add_argument("--source", default=None, help="a folder with train.jsonl and test.jsonl, or a hub id")
    parser.add_argument("--out", type=Path, default=None, help="output folder (default data/DATASET)")
    parser.add_argument("--flavour", default=None, help="gsm8k: plain, tool, interaction or tool+interaction")
    parser.add_argument(
        "--interaction", default=None, metavar="NAME", help="gsm8k: the simulated user, e.g. code_verify"
    )


def run(args: argparse.Namespace) -> int:
    """The files go under the current folder."""
    if args.dataset not in ("gsm8k", "arithmetic"):
        raise ConfigError(unknown("data set", args.dataset, ("gsm8k", "arithmetic")))
    out = args.out or Path("data") / args.dataset
    if args.dataset == "arithmetic":
        from turnwise.tasks.arithmetic import prepare as prepare_arithmetic

        written = prepare_arithmetic(out)
    else:
        from turnwise.tasks.gsm8k import Flavour
        from turnwise.tasks.gsm8k import prepare as prepare_gsm8k

        default = "interaction" if args.interaction else "plain"
        name = args.flavour or default
        if name not in [flavour.value for flavour in Flavour]:
            raise ConfigError(unknown("flavour", name, [flavour.value for flavour in Flavour]))
        source = args.source or "openai/gsm8k"
        report = prepare_gsm8k(source, out, flavour=Flavour(name), interaction=args.interaction)
        written = {report.files[split]: report.rows[split] for split in report.files}
    for path, count in written.items():
        sys.stdout.write(f"wrote {path} ({count} rows)\n")
    return 0

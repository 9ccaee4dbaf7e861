"""`turnwise prepare TASK`: the files of a task that reads files; what can be chosen is the task's to say."""

import argparse
import sys

HELP = "make train and test parquet files of a task"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command; those after the task are the task's own."""
    parser.add_argument("task", metavar="TASK", help="such as gsm8k, or my_task.py; `TASK --help` lists its options")
    options = parser.add_argument("options", nargs=argparse.REMAINDER, help="--out FOLDER (default data/TASK) and more")
    options.required = False  # Python 3.11 calls what is left required


def run(args: argparse.Namespace) -> int:
    """Write the files and say how many rows each has."""
    from turnwise.data.task import prepare_files

    for path, count in prepare_files(args.task, args.options).items():
        sys.stdout.write(f"wrote {path} ({count} rows)\n")
    return 0

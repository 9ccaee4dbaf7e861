"""`turnwise show RUN`: one recorded trajectory, coloured by who wrote what."""

import argparse
from pathlib import Path

from turnwise.errors import ConfigError

HELP = "print a recorded trajectory, coloured by origin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, such as runs/eval-20260101-120000")
    parser.add_argument("--sample", type=int, default=0, metavar="K", help="which trajectory (default 0)")


def run(args: argparse.Namespace) -> int:
    """Of the newest file of trajectories."""
    from rich.console import Console

    from turnwise.errors import StorageError
    from turnwise.storage.run_dir import RunDir
    from turnwise.storage.trajectories.files import read_trajectories
    from turnwise.storage.transcript import transcript

    directory = RunDir.open(args.run_dir)
    files = sorted([*directory.path.glob("eval/*.parquet"), *directory.path.glob("trajectories/*.parquet")])
    if not files:
        raise StorageError(f"{directory.path} holds no trajectories yet")
    trajectories = read_trajectories(files[-1], unread=True)
    if not 0 <= args.sample < len(trajectories):
        raise ConfigError(f"--sample {args.sample}: {files[-1].name} holds trajectories 0 to {len(trajectories) - 1}")
    Console().print(transcript(trajectories[args.sample], None))
    return 0

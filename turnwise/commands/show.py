"""`turnwise show RUN`: recorded trajectories, coloured by who wrote what."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.storage.run_dir import RunDir
    from turnwise.types import Trajectory

HELP = "print recorded trajectories, coloured by origin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, such as runs/eval-20260101-120000")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sample", type=int, default=0, metavar="K", help="which trajectory of the file (default 0)")
    which.add_argument("--worst", type=int, metavar="N", help="those N of the file with the lowest rewards")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--step", type=int, metavar="STEP", help="of the episodes that this step trained on")
    where.add_argument(
        "--file", metavar="FILE", help="such as eval/step_000010 (default: the newest of training, else of evaluation)"
    )
    parser.add_argument("--raw", action="store_true", help="what the model wrote, with its tags, as it wrote it")
    parser.epilog = """\
examples:
  turnwise show runs/first --sample 3                  one transcript
  turnwise show runs/first --worst 3 --step 10         the three lowest rewards of step 10
  turnwise show runs/first --file eval/step_000019     of an evaluation
"""


def run(args: argparse.Namespace) -> int:
    """Each with the place it has in its file, which `replay` takes too."""
    from rich.console import Console
    from rich.text import Text

    from turnwise.storage.run_dir import RunDir
    from turnwise.storage.trajectories.files import read_trajectories
    from turnwise.storage.transcript import transcript

    directory = RunDir.open(args.run_dir)
    name = chosen_file(directory, args.step, args.file)
    trajectories = read_trajectories(directory.path / f"{name}.parquet", unread=True)
    out = Console()
    for row in chosen_rows(trajectories, name, args.sample, args.worst):
        out.print(Text(f"{name}, --sample {row}", style="dim"))
        out.print(transcript(trajectories[row], raw=args.raw))
    return 0


def chosen_file(run: "RunDir", step: int | None, file: str | None) -> str:
    """The file of a run that is meant, without its ending."""
    from turnwise.storage.recorded_run import RecordedRun
    from turnwise.storage.run_dir import trajectory_file

    recorded = RecordedRun(run.path)
    if step is None:
        return recorded.file(file)
    name = trajectory_file(step).removesuffix(".parquet")
    if name not in recorded.files:
        steps = [int(other[-6:]) for other in recorded.files if other.startswith("trajectories/")]
        trained = f"it has steps {min(steps)} to {max(steps)}" if steps else "it has none of training"
        raise ConfigError(f"--step {step}: {run.path} has no episodes of it; {trained} (--file names an evaluation)")
    return name


def chosen_rows(trajectories: "list[Trajectory]", name: str, sample: int, worst: int | None) -> list[int]:
    """The places in the file of what is meant, the worst one first."""
    if worst is None:
        if not 0 <= sample < len(trajectories):
            raise ConfigError(f"--sample {sample}: {name} holds trajectories 0 to {len(trajectories) - 1}")
        return [sample]
    if worst < 1:
        raise ConfigError(f"--worst {worst}: a number from 1 on")
    rewards = {row: t.reward for row, t in enumerate(trajectories) if t.reward is not None}
    if not rewards:
        raise ConfigError(f"--worst {worst}: nothing in {name} has a reward")
    return sorted(rewards, key=lambda row: rewards[row])[:worst]

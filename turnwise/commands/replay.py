"""`turnwise replay RUN`: play a recorded episode again with the same noise, or from an edited message on."""

import argparse
import json
import sys
from pathlib import Path

from turnwise.commands import add_json, add_trust
from turnwise.errors import ConfigError

HELP = "play a recorded episode again: the same tokens, or what would follow an edited message or tool result"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="config values other than the run's, such as seed=1",
    )
    parser.add_argument("--sample", type=int, default=0, metavar="K", help="which trajectory of the file (default 0)")
    parser.add_argument(
        "--file",
        default=None,
        metavar="FILE",
        help="such as trajectories/step_000010 (default: the newest whose weights are kept)",
    )
    parser.add_argument(
        "--edit", default=None, metavar="PLACE",
        help="turn=2: the reply to that turn; turn=2,call=1: one of several tool results; turn=2,assistant: the "
        "turn's own words",
    )  # fmt: skip
    parser.add_argument("--with", dest="text", default=None, metavar="TEXT", help="the new text")
    parser.add_argument(
        "--model", default=None, metavar="PATH", help="weights to use (default: those that wrote the episode)"
    )
    add_trust(parser)
    add_json(parser)
    parser.epilog = """\
examples:
  turnwise replay runs/NAME --sample 3                                   the same tokens again
  turnwise replay runs/NAME --sample 3 --edit turn=0 --with 42           another tool result, and what follows from it
  turnwise replay runs/NAME --edit turn=1 --with "Are you sure?"         a word of the user's where nobody had spoken
"""


def run(args: argparse.Namespace) -> int:
    """The episode goes to a run directory of its own beside RUN; the difference is printed."""
    from dataclasses import replace

    from rich.console import Console

    from turnwise.data.task_config import compose
    from turnwise.reports.replay import Edit, Recorded, replay, replay_config
    from turnwise.storage.episode_differences import shown
    from turnwise.storage.run_dir import RunDir
    from turnwise.system.stopping import run_stoppable
    from turnwise.training.runs.trust import check_run, check_sample, check_trust

    if (args.edit is None) != (args.text is None):
        raise ConfigError("--edit (the place) and --with (the new text) go together: give both, or none for no change")
    edit = None if args.edit is None else Edit.of(args.edit, args.text)
    directory = RunDir.open(args.run_dir)
    check_run(directory, trusted=args.trust_run)
    composed = compose(args.overrides, recorded=directory.path / "config.yaml").config
    check_trust(directory, composed, compose(args.overrides).config, trusted=args.trust_run)
    recorded = Recorded.find(directory, args.sample, args.file, any_weights=args.model is not None)
    check_sample(directory, recorded.trajectory.sample, trusted=args.trust_run)
    if edit is not None:
        edit.check(recorded.trajectory)
    config, notes = replay_config(composed, recorded, args.model)
    config = replace(config, runs_dir=str(directory.path.resolve().parent))
    replayed = run_stoppable(replay(recorded, edit, config, notes, Console(stderr=True)))
    out = Console()
    episode = f"{recorded.file}, --sample {recorded.row}, of {recorded.trajectory.sample.id}"
    out.print(f"played again: {episode}", soft_wrap=True, highlight=False, markup=False)
    for note in replayed.notes:
        out.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    out.print(shown(replayed.found))
    out.print(f"written: {replayed.written}", soft_wrap=True, highlight=False, markup=False)
    if args.json:
        sys.stdout.write(json.dumps(replayed.as_json() | {"written": str(replayed.written)}) + "\n")
    return 0

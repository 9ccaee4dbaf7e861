"""`turnwise export-jsonl RUN --out FOLDER`: a run's episodes in the files that RL logging board opens."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

GROUP = "after a run"
HELP = "write a run's episodes for RL logging board (rollout_data_rank*.jsonl)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run, such as runs/train-1")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new folder of the board's logs")
    parser.add_argument("--eval", action="store_true", help="the evaluations in place of the training steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    """The run is only read; an existing folder is never touched."""
    from turnwise.ext.verl.dumps.write import export_dumps
    from turnwise.storage.run_dir import RunDir

    done = export_dumps(RunDir.open(args.run), args.out, evaluations=args.eval)
    sys.stdout.write(f"wrote {done.file}: {done.lines} episodes of {done.steps} steps\n")
    for note, count in sorted(done.notes.items()):
        sys.stdout.write(f"  {count} {note}\n")
    if args.json:
        sys.stdout.write(json.dumps(asdict(done) | {"file": str(done.file)}) + "\n")
    return 0

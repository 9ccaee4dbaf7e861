"""`turnwise note RUN`: a note and tags of a run, which the board's list of runs shows and searches."""

import argparse
import sys
from pathlib import Path

GROUP = "after a run"
HELP = "write a note or tags on a run, which the board shows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, such as runs/first")
    parser.add_argument("text", nargs="?", metavar="TEXT", help='the note; "" removes it')
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="add a tag; may be given again")
    parser.add_argument("--untag", action="append", default=[], metavar="TAG", help="remove a tag; may be given again")
    parser.epilog = """\
examples:
  turnwise note runs/first "reward without the format part" --tag baseline
  turnwise note runs/first                             what it says now
"""


def run(args: argparse.Namespace) -> int:
    """Without anything to change, says what there is."""
    from turnwise.ext.board.notes import changed, read_notes, write_notes
    from turnwise.storage.run_dir import RunDir
    from turnwise.storage.transcript import visible

    directory = RunDir.open(args.run_dir)
    notes = read_notes(directory)
    if args.text is not None or args.tag or args.untag:
        notes = changed(notes, args.text, args.tag, args.untag)
        write_notes(directory, notes)
    tags = f"tags: {', '.join(notes.tags)}" if notes.tags else "no tags"
    sys.stdout.write(f"{visible(notes.note) or 'no note'}\n{visible(tags)}\n")
    return 0

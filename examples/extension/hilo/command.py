"""`turnwise hilo`: how many guesses are enough."""

import argparse
import sys

GROUP = "games"
HELP = "say how many guesses find any number"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("highest", type=int, nargs="?", default=100, help="default 100")


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(f"{args.highest.bit_length()} guesses find any number from 1 to {args.highest}\n")
    return 0

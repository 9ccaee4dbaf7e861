"""`turnwise board`: a local page over run directories, read-only unless it may replay."""

import argparse
import os
import sys
from pathlib import Path

from turnwise.errors import ConfigError

GROUP = "after a run"
HELP = "show runs in a browser: curves, tools, trajectories, tokens, health"
PORT = 7007


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUNS", help="folders of runs, or single runs (default: ./runs)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but this one needs a token")
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0 takes any that is free")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "--replay", action="store_true", help="let the page play episodes again, as `turnwise replay` does; runs code"
    )
    parser.add_argument("--trust-run", action="store_true", help="with --replay: also runs whose config names code")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # of a training: ends with its parent
    parser.epilog = "The token is the value of the environment variable TURNWISE_BOARD_TOKEN."


def run(args: argparse.Namespace) -> int:
    """The token is in the environment, where a process list does not show it; for the same reason it is not printed."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port}: a port is a number up to 65535")
    if args.trust_run and not args.replay:
        raise ConfigError("--trust-run needs --replay")
    places = args.runs or [Path("runs")]
    for folder in places:
        if not folder.is_dir():
            hint = "name a folder of runs, or a run" if args.runs else "name one: turnwise board DIR"
            raise ConfigError(f"there is no folder {str(folder)!r}; {hint}")
    try:
        from turnwise.ext.board.serve import detach_terminal, serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise ConfigError(f'the board needs {error.name}: pip install "turnwise[board]"') from error
    from turnwise.ext.board.access import TOKEN_ENV
    from turnwise.ext.board.board_process import READY
    from turnwise.ext.board.replays import Replays

    token = os.environ.get(TOKEN_ENV)

    def ready(url: str) -> None:
        sys.stdout.write(f"{READY}{url}\n")
        if args.child:
            detach_terminal()
            return
        if token is not None:
            sys.stdout.write(f"open it once with ?token= and the value of {TOKEN_ENV}\n")
        sys.stdout.flush()
        if args.open:
            import threading
            import webbrowser

            # a browser of the terminal returns only when it is closed
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    replays = Replays(args.trust_run) if args.replay else None
    serve(places, args.host, args.port, token, ready=ready, child=args.child, replays=replays)
    return 0

"""`turnwise serve`: an OpenAI-compatible endpoint of a trained policy, on our own sampler."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.commands import add_config
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.training.runs.policies import NamedPolicy

GROUP = "services"
HELP = "serve a trained policy: an OpenAI-compatible endpoint"
KEY_ENV = "TURNWISE_API_KEY"
PORT = 8000
READ = ("chat.", "engine.", "model.")
"""Sections of a run's config that are read: its tools, users and scorers are the client's matter."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", metavar="RUN|MODEL", help="a run directory, or a model as model.path names it")
    add_config(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but this machine's needs a key")
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help=f"the key is its first line (default: {KEY_ENV})"
    )
    parser.add_argument("--trust-run", action="store_true", help="use code that only the run's config names")
    parser.epilog = f"""\
The key is never an argument, which every process list shows: it is the value of {KEY_ENV}, or stands in a file.

examples:
  turnwise serve runs/first                                    http://127.0.0.1:{PORT}/v1, for this machine only
  turnwise serve tiny --port 9000 sampling.max_tokens=200      values of the config are the defaults of requests
  {KEY_ENV}=... turnwise serve runs/first --host 0.0.0.0
"""


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from turnwise.system.addresses import check_binding
    from turnwise.system.stopping import run_stoppable
    from turnwise.training.runs.policies import find_policy

    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port}: a port is a number up to 65535")
    key = read_key(args.api_key_file)
    check_binding(args.host, key, "a policy's endpoint", "writes", f" in {KEY_ENV} or with --api-key-file")
    found = find_policy(
        args.policy, args.overrides, args.config, trusted=args.trust_run, fixed=["task=null"], read=READ
    )
    run_stoppable(_serve(found, args.host, args.port, key))
    return 0


def read_key(file: Path | None) -> str | None:
    """The key of the file, or else of the environment; None where nobody set one."""
    if file is None:
        return os.environ.get(KEY_ENV)
    try:
        return next(iter(file.read_text(encoding="utf-8").splitlines()), "").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {file}: {getattr(error, 'strerror', None) or error}") from error


async def _serve(policy: "NamedPolicy", host: str, port: int, key: str | None) -> None:
    try:
        from turnwise.ext.serving.app import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f'the endpoint needs {error.name}: pip install "turnwise[serving]"') from error
    await serve(policy, host, port, key, _say)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")

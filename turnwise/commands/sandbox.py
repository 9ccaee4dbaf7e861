"""`turnwise sandbox serve`: our sandbox for other machines, by SandboxFusion's protocol; `serve-swe`: repositories."""

import argparse
import os
import sys

from turnwise.errors import ConfigError

HELP = "serve the sandbox to other machines: Python over SandboxFusion's protocol, or repositories (docs/swe.md)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["serve", "serve-swe"], help="serve: run Python; serve-swe: repositories")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="config values, such as sandbox.seconds=5"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but this one needs a token")
    parser.add_argument("--port", type=int, default=8080, help="default 8080")
    parser.epilog = "The token is the value of the environment variable TURNWISE_SANDBOX_TOKEN."


def run(args: argparse.Namespace) -> int:
    """The token is in the environment, where a process list does not show it."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port}: a port is a number up to 65535")
    import asyncio

    from turnwise.compose import compose

    config = compose(args.overrides, None).config.sandbox
    if config.url is not None or config.swe_url is not None:
        raise ConfigError("sandbox.url or sandbox.swe_url names another server; this command is one")
    try:
        from turnwise.sandbox import server, swe_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: pip install turnwise[server]") from error
    from turnwise.sandbox.opening import TOKEN_ENV, pool_settings
    from turnwise.sandbox.shell_pool import shell_settings
    from turnwise.serving import check_binding

    token = os.environ.get(TOKEN_ENV)
    check_binding(args.host, token, "a sandbox server", "runs code")
    sys.stderr.write(f"serving the sandbox on http://{args.host}:{args.port} until interrupted\n")
    if args.action == "serve-swe":
        swe = swe_server.SweServerSettings(shell_settings(config))
        asyncio.run(swe_server.serve(args.host, args.port, token, swe))
    else:
        settings = server.ServerSettings(pool_settings(config, server.OUTPUT))
        asyncio.run(server.serve(args.host, args.port, token, settings))
    return 0

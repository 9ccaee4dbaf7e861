"""`turnwise sandbox serve`: our sandbox for others, by SandboxFusion's protocol; and `turnwise check sandbox`."""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from turnwise.config.sections import section
from turnwise.errors import ConfigError
from turnwise.ext.sandbox.config import SandboxConfig

if TYPE_CHECKING:
    from turnwise.config import Config

GROUP = "services"
HELP = "serve the sandbox to other machines: Python over SandboxFusion's protocol"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["serve"], help="serve: run Python")
    add_server(parser)


def add_server(parser: argparse.ArgumentParser) -> None:
    """The arguments of a server in whose sandbox others run code."""
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="config values, such as sandbox.seconds=5"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but this one needs a token")
    parser.add_argument("--port", type=int, default=8080, help="default 8080")
    parser.epilog = "The token is the value of the environment variable TURNWISE_SANDBOX_TOKEN."


def run(args: argparse.Namespace) -> int:
    """Serve sandbox sessions by HTTP until interrupted."""
    import asyncio

    try:
        from turnwise.ext.sandbox import server
    except ModuleNotFoundError as error:
        raise ConfigError(f'the server needs {error.name}: pip install "turnwise[sandbox]"') from error
    config, token = config_to_serve(args)
    from turnwise.ext.sandbox.opening import pool_settings

    settings = server.ServerSettings(pool_settings(section(config, SandboxConfig), server.OUTPUT))
    asyncio.run(server.serve(args.host, args.port, token, settings))
    return 0


def config_to_serve(args: argparse.Namespace) -> "tuple[Config, str | None]":
    """What a server is made of: the config, and the token, from the environment, where no process list has it."""
    from turnwise.data.task_config import compose
    from turnwise.ext.sandbox.opening import TOKEN_ENV
    from turnwise.system.addresses import check_binding

    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port}: a port is a number up to 65535")
    config = compose(args.overrides, None).config
    if section(config, SandboxConfig).url is not None:
        raise ConfigError("sandbox.url names another server: leave it out, this command starts one")
    token = os.environ.get(TOKEN_ENV)
    check_binding(args.host, token, "a sandbox server", "runs code")
    sys.stderr.write(f"serving the sandbox on http://{args.host}:{args.port} until interrupted\n")
    return config, token


def check(config: "Config") -> tuple[str, dict[str, Any]]:
    """What the sandbox is worth here: every attack of the probe and how it went."""
    from turnwise.ext.sandbox.opening import open_pool
    from turnwise.ext.sandbox.shell.pool import ShellPool, shell_settings
    from turnwise.ext.sandbox.zygote_process import SandboxUnavailable
    from turnwise.system.stopping import run_stoppable

    sandbox = section(config, SandboxConfig)

    async def probe() -> tuple[str, str]:
        async with open_pool(sandbox) as pool:
            if pool.report is None:
                raise ConfigError(f"{sandbox.url} does not say what it proved")
            return pool.report.level.name, f"{pool.report.text()}\n{await shells()}"

    async def shells() -> str:
        """What was proven of shell sessions, or why there are none; Python sessions do not need them."""
        try:
            async with ShellPool(shell_settings(sandbox)) as pool:
                return "shell sessions" if pool.report is None else f"shell sessions: {pool.report.text()}"
        except SandboxUnavailable as error:
            return f"no shell sessions: {error}"

    level, text = run_stoppable(probe())
    return text, {"level": level, "report": text.splitlines()}

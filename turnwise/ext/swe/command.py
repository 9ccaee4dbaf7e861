"""`turnwise swe serve`: repositories in our sandbox for other machines; and `turnwise check swe`."""

import argparse
from typing import TYPE_CHECKING, Any

from turnwise.config.sections import section
from turnwise.errors import ConfigError
from turnwise.ext.sandbox.command import add_server, config_to_serve
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.swe.config import SweConfig

if TYPE_CHECKING:
    from turnwise.config import Config

GROUP = "services"
HELP = "serve repositories to other machines: bash and edit sessions, and test results (docs/ext/swe.md)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["serve"], help="serve: sessions in repositories")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Serve repositories by HTTP until interrupted."""
    import asyncio

    try:
        from turnwise.ext.swe import server
    except ModuleNotFoundError as error:
        raise ConfigError(f'the server needs {error.name}: pip install "turnwise[swe]"') from error
    config, token = config_to_serve(args)
    if section(config, SweConfig).url is not None:
        raise ConfigError("swe.url names another server: leave it out, this command starts one")
    from turnwise.ext.sandbox.shell.pool import shell_settings

    settings = server.SweServerSettings(shell_settings(section(config, SandboxConfig)))
    asyncio.run(server.serve(args.host, args.port, token, settings))
    return 0


def check(config: "Config") -> tuple[str, dict[str, Any]]:
    """What was proven of the shell sessions that repositories are in, here or at a server."""
    from turnwise.ext.swe.remote import open_shells
    from turnwise.system.stopping import run_stoppable

    async def probe() -> str:
        async with open_shells(section(config, SandboxConfig), section(config, SweConfig).url) as place:
            return "shell sessions" if place.report is None else f"shell sessions: {place.report.text()}"

    text = run_stoppable(probe())
    return text, {"report": text.splitlines()}

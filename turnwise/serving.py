"""How our servers are run, and who may reach them: this machine, or those who hold the token."""

import ipaddress
from typing import TYPE_CHECKING

from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI


def check_binding(host: str, token: str | None, server: str, does: str, where: str = "") -> None:
    """ConfigError for a server that strangers could use: `check_binding("0.0.0.0", None, "a board", "shows runs")`.

    `where` says how it gets its token: " in TURNWISE_BOARD_TOKEN".
    """
    if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
        raise ConfigError(f"{server}'s token is printable ASCII without spaces, and not empty")
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{server} on {host!r} {does} for everybody who reaches it: give it a token{where}, or bind 127.0.0.1"
        )


async def serve_app(app: "FastAPI", host: str, port: int) -> None:
    """Serve until interrupted."""
    import uvicorn

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        ws="none",
        server_header=False,
        timeout_keep_alive=75,  # longer than a client keeps an idle connection, so that none is used as it closes
        timeout_graceful_shutdown=5,
    )
    await uvicorn.Server(config).serve()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Who may reach a server of ours: this machine, or those who hold its token."""

import ipaddress

from turnwise.errors import ConfigError


def check_binding(host: str, token: str | None, server: str, does: str) -> None:
    """ConfigError for a server that strangers could use: `check_binding("0.0.0.0", None, "a board", "shows runs")`."""
    if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
        raise ConfigError(f"{server}'s token is printable ASCII without spaces, and not empty")
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{server} on {host!r} {does} for everybody who reaches it: give it a token, or bind 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Which addresses a server may listen on, and the socket it does it with; needs the standard library only."""

import errno
import ipaddress
import socket

from turnwise.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_everywhere(host: str) -> bool:
    """Whether it stands for every address of a machine."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


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


def bind(host: str, port: int, *, any_port: bool = False) -> socket.socket:
    """A listening socket. ConfigError when it cannot be had; with `any_port` another port will do."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: a port is a number up to 65535")
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        listening = socket.create_server(address, family=family)
        # Without it a body waits 40 ms for the client to acknowledge the headers. asyncio would set it, but knows TCP
        # only by a protocol number that sockets made this way do not carry.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        if any_port and error.errno in (errno.EADDRINUSE, errno.EACCES):
            return bind(host, 0)
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is taken on {host}; choose another with --port") from error
        raise ConfigError(f"cannot listen on {host}, --port {port}: {error.strerror or error}") from error
    except UnicodeError as error:  # of a name that no host can have
        raise ConfigError(f"cannot listen on {host!r}: it is not a host name") from error

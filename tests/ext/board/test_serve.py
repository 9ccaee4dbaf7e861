"""Binding: clear errors, another port when that is allowed, and no waiting between headers and body."""

import socket
from importlib.util import find_spec

import pytest

from turnwise.errors import ConfigError
from turnwise.ext.board.serve import WARMED, bind


def test_connections_do_not_wait_for_acknowledgements():
    with bind("127.0.0.1", 0) as listening:
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_taken_port_is_refused_unless_any_will_do():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken.*--port"):
            bind("127.0.0.1", port)
        with bind("127.0.0.1", port, any_port=True) as second:
            assert second.getsockname()[1] not in (0, port)


def test_a_name_without_an_address_is_a_clear_error():
    with pytest.raises(ConfigError, match="cannot listen"):
        bind("a..b", 0)


def test_what_is_imported_ahead_is_there():
    assert [name for name in WARMED if find_spec(f"turnwise.ext.board.{name}") is None] == []

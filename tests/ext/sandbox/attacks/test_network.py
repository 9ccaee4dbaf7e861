"""Attacks 21-27: every way to reach a socket that is not the session's own."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REACHING = {
    "21 TCP": "s = socket.create_connection(('127.0.0.1', TCP), 2); s.send(b'x'); return 'connected'",
    "21 TCP over IPv6": "s = socket.socket(socket.AF_INET6); s.connect(('::1', TCP6)); return 'connected'",
    "21 without waiting": "s = socket.socket(); s.setblocking(False); return s.connect_ex(('127.0.0.1', TCP)) or 'connected'",
    "21 fast open": "s = socket.socket(); return s.sendto(b'x', 0x20000000, ('127.0.0.1', TCP))",
    "22 UDP": "return socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))",
    "22 UDP connected": """
        s = socket.socket(type=socket.SOCK_DGRAM)
        s.connect(('127.0.0.1', UDP))
        return s.send(b'x')""",
    "22 UDP by message": "return socket.socket(type=socket.SOCK_DGRAM).sendmsg([b'x'], [], 0, ('127.0.0.1', UDP))",
    "23 abstract": "s = socket.socket(socket.AF_UNIX); s.connect(ABSTRACT); return 'connected'",
    "23 abstract datagram": "return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', DATAGRAM)",
    "23 a pair redirected": "return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', DATAGRAM)",
    "23 a pair connected": "a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.connect(DATAGRAM); return a.send(b'x')",
    "27 in a folder": "s = socket.socket(socket.AF_UNIX); s.connect(PATH); return 'connected'",
    "26 urllib": "import urllib.request; return urllib.request.urlopen(f'http://127.0.0.1:{TCP}', timeout=2)",
    "26 http.client": """
        import http.client
        c = http.client.HTTPConnection('127.0.0.1', TCP, timeout=2)
        c.connect()
        return 'connected'""",
}
MAKING = {
    "24 netlink": "return socket.socket(16, socket.SOCK_RAW, 0)",
    "24 packet": "return socket.socket(17, socket.SOCK_RAW, 0)",
    "24 raw": "return socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "24 ping": "return socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1)",
    "24 vsock": "return socket.socket(40, socket.SOCK_STREAM)",
    "24 crypto": "return socket.socket(38, socket.SOCK_SEQPACKET)",
    "24 bluetooth": "return socket.socket(31, socket.SOCK_RAW, 1)",
    "25 listen": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); return s",
    "25 listen on IPv6": "s = socket.socket(socket.AF_INET6); s.bind(('::1', 0)); s.listen(); return s",
    "25 listen, abstract": "s = socket.socket(socket.AF_UNIX); s.bind('\\0turnwise-evil'); s.listen(); return s",
    "25 listen in the scratch folder": "s = socket.socket(socket.AF_UNIX); s.bind('evil'); s.listen(); return s",
    "26 DNS": "return socket.getaddrinfo('example.org', 80)",
    "26 name of an address": "return socket.gethostbyaddr('192.0.2.1')",
    "24 datagram pair": "return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "24 vsock pair": "return socket.socketpair(socket.AF_INET, socket.SOCK_STREAM)",
    "87 descriptors by message": """
        import array
        a, b = socket.socketpair()
        return a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [3]))])""",
    "24 messages in bulk": "return syscall('sendmmsg', 3, 0, 0, 0)",
}


class Listeners:
    """Sockets of the host that everybody may reach, and whether anybody did."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnwise-net-")))
        folder.chmod(0o777)
        name = f"\0turnwise-{os.urandom(6).hex()}"
        self.streams = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))),
            stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6)),
            stack.enter_context(socket.socket(socket.AF_UNIX)),
            stack.enter_context(socket.socket(socket.AF_UNIX)),
        ]
        self.datagrams = [
            stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)),
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)),
        ]
        self.streams[2].bind(name)
        self.streams[3].bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        self.datagrams[0].bind(("127.0.0.1", 0))
        self.datagrams[1].bind(name + "-datagram")
        for one in self.streams:
            one.listen()
        for one in (*self.streams, *self.datagrams):
            one.setblocking(False)
        self.names = {
            "TCP": self.streams[0].getsockname()[1],
            "TCP6": self.streams[1].getsockname()[1],
            "UDP": self.datagrams[0].getsockname()[1],
            "ABSTRACT": name,
            "DATAGRAM": name + "-datagram",
            "PATH": str(folder / "socket"),
        }

    def reached(self) -> int:
        """How many connections and datagrams came."""
        count = 0
        for one in self.streams:
            with contextlib.suppress(BlockingIOError):
                one.accept()[0].close()
                count += 1
        for one in self.datagrams:
            with contextlib.suppress(BlockingIOError):
                one.recv(9)
                count += 1
        return count


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    with contextlib.ExitStack() as stack:
        yield Listeners(stack)


def test_no_socket_of_the_host_is_reached(arena, listeners):
    for name, attempt in arena.attacks(REACHING, **listeners.names).items():
        failure = attempt.result.failure
        assert attempt.refused or (failure and failure.kind == "URLError"), (name, attempt)
    assert listeners.reached() == 0


def test_no_other_socket_is_made(arena):
    for name, attempt in arena.attacks(MAKING).items():
        failure = attempt.result.failure
        assert attempt.refused or (failure and failure.kind == "herror"), (name, attempt)


REAL = {name: body for name, body in REACHING.items() if name not in ("21 without waiting", "26 urllib")}


def test_a_socket_is_reached_and_made_without_a_sandbox(defenceless, listeners):
    """That somebody listens; the long tail tries every one of the attacks."""
    assert defenceless.attack(REACHING["21 TCP"], **listeners.names).found is not None
    assert listeners.reached() == 1
    assert defenceless.attack(MAKING["25 listen"]).found is not None


@pytest.mark.long
@pytest.mark.parametrize("body", REAL.values(), ids=REAL)
def test_these_are_attacks(defenceless, listeners, body):
    attempt = defenceless.attack(body, **listeners.names)
    assert attempt.found is not None, attempt
    assert listeners.reached() > 0


MADE = [name for name in MAKING if name.startswith(("25", "24 netlink", "24 datagram", "87"))]


@pytest.mark.long
@pytest.mark.parametrize("name", MADE)
def test_these_sockets_can_be_made_without_a_sandbox(defenceless, name):
    attempt = defenceless.attack(MAKING[name])
    assert attempt.found is not None, attempt


def test_a_pair_of_its_own_works(arena):
    """What asyncio needs inside."""
    assert arena.run("a, b = socket.socketpair(); a.send(b'hello'); b.recv(9)").value == "b'hello'"
    assert arena.run("import asyncio; asyncio.run(asyncio.sleep(0, 'slept'))").value == "'slept'"

"""Connections of our own to a server: used again, every kind of body, and what breaks off."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from turnwise.errors import EngineError, EngineLost
from turnwise.ext.servers import client as client_module
from turnwise.ext.servers import connections as connections_module
from turnwise.ext.servers.client import ServerClient

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SIZED = HEAD + b"Content-Length: 7\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ANSWERS = {
    "sized": (SIZED + b'{"a":1}', 1),
    "chunked": (CHUNKED + b'3;x=y\r\n{"a\r\n4\r\n":1}\r\n0\r\nTrailer: 1\r\n\r\n', 1),
    "it closes": (HEAD + b"Connection: close\r\nContent-Length: 7\r\n\r\n" + b'{"a":1}', 3),
    "until the end": (HEAD + b'\r\n{"a":1}', 3),
}
BROKEN = {
    "no HTTP": b"what?\r\n\r\n",
    "nothing": b"",
    "half a head": b"HTTP/1.1 200",
    "half a body": SIZED + b'{"a"',
    "half a chunk": CHUNKED + b'7\r\n{"a"',
    "no next chunk": CHUNKED + b'3\r\n{"a\r\n',
    "no size": CHUNKED + b"zz\r\n",
}


@asynccontextmanager
async def served(answer: bytes) -> AsyncIterator[tuple[ServerClient, list[bytes]]]:
    """A client of a server that says this to every request, and the first line of each connection."""
    met: list[bytes] = []
    open_ones: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.append(writer)
        try:
            met.append(await reader.readuntil(b"\r\n\r\n"))
            while True:
                await reader.readexactly(int(met[-1].split(b"Content-Length: ")[1].split(b"\r\n")[0]))
                writer.write(answer)
                if b"Content-Length" not in answer and not answer.endswith(b"0\r\nTrailer: 1\r\n\r\n"):
                    writer.write_eof()
                if b"close" in answer or (len(answer) < len(SIZED) + 7 and answer.startswith(SIZED)):
                    writer.close()
                met[-1] = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = ServerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/", "secret")
    try:
        yield client, met
    finally:
        await client.close()
        for writer in open_ones:
            writer.close()
        server.close()


def run(answer: bytes, work: Callable[[ServerClient, list[bytes]], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), served(answer) as (client, met):
            await work(client, met)

    asyncio.run(main())


@pytest.mark.parametrize(("answer", "connections"), ANSWERS.values(), ids=ANSWERS)
def test_every_kind_of_body_is_read_and_its_connection_used_again_where_it_can_be(
    answer: bytes, connections: int
) -> None:
    async def work(client: ServerClient, met: list[bytes]) -> None:
        for _ in range(3):
            assert await client.write("/x", {"b": 2}) == {"a": 1}
        assert len(met) == connections
        assert met[0].startswith(b"POST /base/x HTTP/1.1\r\n") and b"Authorization: Bearer secret" in met[0]

    run(answer, work)


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
def test_what_breaks_off_on_the_way_is_a_lost_server(answer: bytes) -> None:
    async def work(client: ServerClient, met: list[bytes]) -> None:
        with pytest.raises(EngineLost, match=r"127\.0\.0\.1:\d+/base/x"):
            await client.write("/x", {})

    run(answer, work)


def test_an_answer_without_an_end_and_one_that_refuses_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LONGEST", 5)

    async def long(client: ServerClient, _: list[bytes]) -> None:
        with pytest.raises(EngineError, match="an answer without an end"):
            await client.write("/x", {})

    run(ANSWERS["sized"][0], long)

    async def refused(client: ServerClient, _: list[bytes]) -> None:
        with pytest.raises(EngineError, match="answered 400: no such thing") as caught:
            await client.write("/x", {})
        assert not isinstance(caught.value, EngineLost)

    run(b"HTTP/1.1 400 Bad\r\nContent-Length: 13\r\n\r\nno such thing", refused)


def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: ServerClient, met: list[bytes]) -> None:
        await client.write("/x", {})
        monkeypatch.setattr(connections_module, "IDLE_SECONDS", -1.0)
        await client.write("/x", {})
        assert len(met) == 2

    run(ANSWERS["sized"][0], work)


def test_where_a_proxy_is_in_between_turns_go_by_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "inside")
    found: dict[str, Any] = {
        host: ServerClient(f"http://{host}:1")._connections for host in ("outside", "inside", "127.0.0.1")
    }
    assert [host for host, own in found.items() if own is None] == ["outside"]

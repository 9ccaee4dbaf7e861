"""Kept connections of HTTP/1.1 to one server: a body out, status and bytes of the answer in.

Turns go over these and not over httpx, whose own work for a request is many times as much, and grows with the number
of those under way: with many short turns the client was what the server waited for.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import NamedTuple

import httpx

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0
"""An idle connection is not used again after this; servers close theirs after five."""
LONGEST_HEAD = 2**16
LONGEST_LINE = 2**10
"""Of what stands between the chunks of an answer."""


class HttpAnswer(NamedTuple):
    """What a server answers; `body` is read once, to its end or not."""

    status: int
    body: AsyncGenerator[bytes, None]


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0

    def usable(self) -> bool:
        fresh = time.monotonic() - self.idle_since < IDLE_SECONDS
        return fresh and not self.reader.at_eof() and not self.writer.is_closing()


class Connections:
    """As many as there are requests at once; one that is free again is used for the next request.

    What goes wrong on the way is an OSError or an EOFError.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        at = httpx.URL(url)
        self._host, self._port = at.host, at.port or (443 if at.scheme == "https" else 80)
        self._tls = httpx.create_ssl_context() if at.scheme == "https" else None
        self._path = at.raw_path.decode("ascii").rstrip("/")
        lines = {"Host": at.netloc.decode("ascii"), "Content-Type": "application/json"} | dict(headers)
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def close(self) -> None:
        """Ends those that are idle; the others end with their requests."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.writer.close()
        await asyncio.gather(*(connection.writer.wait_closed() for connection in idle), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def post(self, path: str, content: bytes) -> AsyncIterator[HttpAnswer]:
        """Leaving it before the body's end closes the connection, which tells the server to stop."""
        connection = self._free() or await self._connect()
        whole = False
        try:
            head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\n\r\n"
            connection.writer.write(head.encode("ascii") + content)
            await connection.writer.drain()
            status, headers = await _read_head(connection.reader)
            ended = asyncio.Event()
            async with aclosing(_body(connection.reader, headers, ended)) as body:
                yield HttpAnswer(status, body)
            whole = ended.is_set() and headers.get("connection", "").lower() != "close"
        finally:
            if whole:
                self._idle.append(connection._replace(idle_since=time.monotonic()))
            else:
                connection.writer.transport.abort()

    def _free(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection
            connection.writer.transport.abort()
        return None

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(CONNECT_SECONDS):
            opened = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=LONGEST_HEAD)
        return _Connection(*opened)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in lower case."""
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(first.split(" ", 2)[1])
    except (asyncio.LimitOverrunError, ValueError, IndexError) as error:
        raise ConnectionError("the answer is no HTTP") from error
    pairs = (line.partition(":") for line in lines if line)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(
    reader: asyncio.StreamReader, headers: Mapping[str, str], ended: asyncio.Event
) -> AsyncGenerator[bytes, None]:
    """The bytes of an answer as they come; `ended` is set where the next answer could follow."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := await _chunk_size(reader):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        while (await reader.readline()).strip():  # trailers, which nobody reads
            pass
        ended.set()
    elif (length := headers.get("content-length", "")).isdecimal():
        left = int(length)
        ended.set() if not left else None
        while left:
            part = await reader.read(min(left, LONGEST_HEAD))
            if not part:
                raise EOFError(f"{left} bytes of the answer are missing")
            left -= len(part)
            if not left:
                ended.set()
            yield part
    else:  # it ends with the connection
        while part := await reader.read(LONGEST_HEAD):
            yield part


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    try:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the answer breaks off")
        return int(line.split(b";")[0], 16)
    except ValueError as error:  # also a line without an end
        raise ConnectionError("the answer is no HTTP") from error

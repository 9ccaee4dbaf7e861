"""How our servers are run, and the one gate before them all: the sandbox, rewards, the judge and the board."""

import asyncio
import base64
import binascii
import contextlib
import hmac
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from turnwise.system.addresses import bind, is_everywhere, is_loopback

RETRY_SECONDS = "1"
IDLE_SECONDS = 75.0
"""Longer than a client keeps an idle connection, so that none is used as it closes."""
_MOST_BODIES = 8
"""Bodies of the largest size that may be in memory at once."""
_WATCH_SECONDS = 1.0
_HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{1,5})?", re.ASCII)
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


async def serve_app(
    app: ASGIApp,
    host: str,
    port: int,
    idle_seconds: float = IDLE_SECONDS,
    *,
    ready: Callable[[int], None] | None = None,
) -> None:
    """Serves an app on this host and port until the process is interrupted; `ready` is told the port it listens on."""
    with bind(host, port) as listening:
        if ready is not None:
            ready(listening.getsockname()[1])
        await uvicorn.Server(_settings(app, idle_seconds)).serve(sockets=[listening])


@contextlib.asynccontextmanager
async def serving_beside(app: ASGIApp, host: str) -> AsyncIterator[int]:
    """Serve on a port of the system's choice while the block runs, in its event loop; signals stay the caller's."""
    with bind(host, 0) as listening:
        server = _Beside(_settings(app, IDLE_SECONDS))
        work = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            while not server.started and not work.done():  # one that is stopped before would leave its socket open
                await asyncio.sleep(0.001)
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await work


class _Quiet(logging.Filter):
    """Without what uvicorn says of requests that were under way when it was told to stop: that is what was wanted."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record of uvicorn's log is worth a line."""
        stopped = isinstance(record.exc_info, tuple) and isinstance(record.exc_info[1], asyncio.CancelledError)
        return not stopped and "timeout graceful shutdown exceeded" not in record.getMessage()


class _Beside(uvicorn.Server):
    """A server that leaves signals alone: they are for the work that it is beside."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _settings(app: ASGIApp, idle_seconds: float) -> uvicorn.Config:
    class Protocol(_Impatient):
        grace_seconds = idle_seconds

    settings = uvicorn.Config(
        app,
        http=Protocol,
        log_level="warning",
        ws="none",
        server_header=False,
        timeout_keep_alive=int(max(1, idle_seconds)),
        timeout_graceful_shutdown=5,
    )
    log = logging.getLogger("uvicorn.error")
    if not any(isinstance(log_filter, _Quiet) for log_filter in log.filters):
        log.addFilter(_Quiet())
    return settings


class _Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that asks for nothing is closed, also one that sent half a head: uvicorn would wait for ever."""

    grace_seconds = IDLE_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.loop.call_later(self.grace_seconds, self._close_if_idle, None)

    def _close_if_idle(self, idle_since: object) -> None:
        """Close it when nothing was asked since the last look; `idle_since` is the request that had ended by then."""
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is idle_since:
            self.transport.close()
        else:
            self.loop.call_later(self.grace_seconds, self._close_if_idle, self.cycle if is_idle else self)


# --- the gate -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Intake:
    """How much a server takes in: `Intake(body=2**20)`."""

    body: int = 64 * 1024 * 1024
    """Bytes of one request."""
    seconds: float = 60.0
    """Within which all of a body must have come."""
    calls: int = 256
    """Answered at once; more are asked to come again. While its body comes, a request keeps nobody out."""
    values: int = 4_000_000
    """Of the JSON in a body, as its commas and brackets tell: `[[],[],[]]` takes thirty times its bytes in memory."""


class Gate:
    """ASGI middleware: who may ask, and with what. Nothing behind it sees a request that was not let through.

    Against DNS rebinding the Host must be ours. A body must be declared as JSON, which a web page elsewhere cannot do
    without asking first. A call ends with its client: when the connection is gone, what works for it is cancelled.
    """

    methods: tuple[str, ...] = ("GET", "HEAD", "POST", "DELETE")
    open_paths: tuple[str, ...] = ("/health",)
    """They need no token, and say nothing but that somebody is there."""

    def __init__(self, app: ASGIApp, host: str, token: str | None, intake: Intake | None = None) -> None:
        self._app = app
        self._host = host.lower()
        self._token = token
        self._intake = intake or Intake()
        self._calls = 0
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # there are no websockets here
            return await send({"type": "websocket.close", "code": 1008})
        answer = self.refusal(scope)
        if answer is not None:
            return await answer(scope, receive, send)
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        await self._take(scope, receive, send)

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not let through."""
        headers = Headers(scope=scope)
        if scope["method"] not in self.methods:
            allowed = ", ".join(self.methods)
            return self.refuse(405, f"this server takes {allowed}", {"Allow": allowed})
        if not self._is_ours(headers.getlist("host")):
            return self.refuse(400, "nothing is served under that host name here")
        if self._token is not None and scope["path"] not in self.open_paths and not self.knows(headers, self._token):
            return self.refuse(401, "this server needs its token", {"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST" and not _is_json(headers.getlist("content-type")):
            return self.refuse(
                415, "the body must be JSON, with Content-Type: application/json", {"Connection": "close"}
            )
        return None

    def refuse(self, status: int, text: str, headers: dict[str, str] | None = None) -> Response:
        """A refusal in the shape that the server's clients read."""
        return refuse(status, text, headers)

    def knows(self, headers: Headers, token: str) -> bool:
        """`Bearer TOKEN`, or `Basic` with it as the password: all that a client has which only takes a URL."""
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            try:
                credentials = base64.b64decode(credentials, validate=True).partition(b":")[2].decode("latin-1")
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        return same(credentials.strip(), token)

    def _is_ours(self, hosts: list[str]) -> bool:
        """A stranger's name that leads to our address is not ours.

        A server on every address of a machine has names that it cannot know; there the token alone decides.
        """
        if len(hosts) != 1:
            return False
        if is_everywhere(self._host) and self._token is not None:
            return True
        name = _host_name(hosts[0])
        return name in _LOCAL or (name != "" and name == self._host) or (is_loopback(self._host) and is_loopback(name))

    async def _take(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        try:
            answer = self._busy() or await self._read(scope, receive, body) or self._busy()
            if answer is not None:
                return await answer(scope, receive, send)
            self._calls += 1
            try:
                await _while_connected(self._app, scope, bytes(body), receive, send)
            finally:
                self._calls -= 1
        finally:
            self._held -= len(body)

    def _busy(self) -> Response | None:
        if self._calls < self._intake.calls:
            return None
        text = "as many calls are running as this server takes; try again"
        return self.refuse(429, text, {"Retry-After": RETRY_SECONDS})

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> Response | None:
        """Fill the body; an answer as soon as it is known not to be taken."""
        intake = self._intake
        too_long = self.refuse(413, f"a request has at most {intake.body} bytes", {"Connection": "close"})
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length[:20]) > intake.body:
            return too_long
        try:
            async with asyncio.timeout(intake.seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return self.refuse(400, "the client disconnected before the body was complete")
                    piece = message.get("body", b"")
                    body += piece
                    self._held += len(piece)
                    if len(body) > intake.body:
                        return too_long
                    if self._held > _MOST_BODIES * intake.body:
                        headers = {"Retry-After": RETRY_SECONDS, "Connection": "close"}
                        return self.refuse(429, "as many bytes are held as this server takes; try again", headers)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            text = f"the body had not come after {intake.seconds:g} s"
            return self.refuse(408, text, {"Connection": "close"})
        if sum(body.count(mark) for mark in (b",", b"[", b"{")) > intake.values:
            return self.refuse(413, f"a request has at most {intake.values} values")
        return None


async def _while_connected(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run the app on a body that was read, and cancel it when its client goes away."""
    given = False
    gone = asyncio.ensure_future(_until_gone(receive))

    async def again() -> Message:
        nonlocal given
        if given:
            await asyncio.wait((gone,))
            return {"type": "http.disconnect"}
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    work = asyncio.ensure_future(app(scope, again, send))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        work.cancel()  # nothing happens to one that has ended
        await asyncio.wait((work, gone))
    if not work.cancelled():
        work.result()


async def _until_gone(receive: Receive) -> None:
    """Asked anew each second: uvicorn stops reading when a client sends on, and reads on when it is asked."""
    while True:
        try:
            async with asyncio.timeout(_WATCH_SECONDS):
                if (await receive())["type"] == "http.disconnect":
                    return
        except TimeoutError:
            continue


def refuse(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    """A JSON response with this status that says why a request is refused."""
    return JSONResponse({"error": text}, status, headers)


def same(actual: str, wanted: str) -> bool:
    """Compared in a time that tells nothing of where they differ."""
    return hmac.compare_digest(actual.encode(), wanted.encode())


def _is_json(kinds: list[str]) -> bool:
    return len(kinds) == 1 and kinds[0].partition(";")[0].strip().lower() == "application/json"


def _host_name(header: str) -> str:
    """A Host header without its port and brackets; nothing for one that is none."""
    match = _HOST.fullmatch(header.strip().lower())
    return "" if match is None else match["six"] or match["name"]

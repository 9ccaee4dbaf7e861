"""Who may ask the board, and under which headers it answers: host, method and token are checked first of all."""

import hmac
import ipaddress
import re
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise.serving import is_loopback

EVENTS = "/api/events"
TOKEN_ENV = "TURNWISE_BOARD_TOKEN"
_HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{1,5})?", re.ASCII)
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_NEEDS_TOKEN = f"this board needs its token: open it once with ?token= and the value of {TOKEN_ENV}"


@dataclass(frozen=True, slots=True)
class Door:
    """Where a board listens and what opens it: `Door("127.0.0.1", 7007)`."""

    host: str
    port: int
    token: str | None = None

    @property
    def url(self) -> str:
        """Its address for a browser on this machine, without the token."""
        host = self.host
        if _is_everywhere(host):
            host = "::1" if ":" in host else "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def cookie(self) -> str:
        """The cookie's name; a browser sends the cookies of one port to all ports of a host."""
        return f"turnwise_board_{self.port}"

    @property
    def pass_word(self) -> str:
        """The cookie's value: proof of the token that does not give it away."""
        return hmac.digest((self.token or "").encode(), b"the board's cookie", "sha256").hex()


def content_policy(script_hashes: list[str]) -> str:
    """The CSP: our own files only, and of inline scripts those with one of these hashes."""
    scripts = " ".join(["'self'", *(f"'sha256-{one}'" for one in script_hashes)])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


class Gate:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, door: Door, policy: str) -> None:
        self._app = app
        self._door = door
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # there are no websockets here
            return await send({"type": "websocket.close", "code": 1008})

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_headers(MutableHeaders(scope=message), scope["path"])
            await send(message)

        answer = self._refusal(scope)
        if answer is not None:
            return await answer(scope, receive, with_headers)
        if scope["method"] == "HEAD" and scope["path"] != EVENTS:  # a stream has no end to leave out
            scope = {**scope, "method": "GET"}  # the server itself leaves the body out
        return await self._app(scope, receive, with_headers)

    def _add_headers(self, headers: MutableHeaders, path: str) -> None:
        headers["Content-Security-Policy"] = self._policy
        headers["X-Content-Type-Options"] = "nosniff"
        headers["Referrer-Policy"] = "no-referrer"
        headers["Cross-Origin-Resource-Policy"] = "same-origin"
        if path.startswith("/api"):
            headers["Cache-Control"] = "no-store"

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not let through, or that brings the token; None for all others."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return _error(405, "the board only shows: GET and HEAD", {"Allow": "GET, HEAD"})
        if not self._is_ours(headers.getlist("host")):
            return _error(400, "this board is not served under that host name")
        if self._door.token is None:
            return None
        brought = _token_in(scope) if scope["path"] == "/" else None
        if brought is not None and _same(brought, self._door.token):
            return self._welcome(scope)
        if self._known(headers):
            return None
        text = _NEEDS_TOKEN if brought is None else "that is not this board's token"
        return _error(401, text, {"WWW-Authenticate": "Bearer"})

    def _is_ours(self, hosts: list[str]) -> bool:
        """Against DNS rebinding: a stranger's name that leads to our address is not ours.

        A board on every address of a machine has names that it cannot know; there the token alone decides.
        """
        if len(hosts) != 1:
            return False
        if _is_everywhere(self._door.host) and self._door.token is not None:
            return True
        name = _host_name(hosts[0])
        return name == self._door.host.lower() or name in _LOCAL or (is_loopback(self._door.host) and is_loopback(name))

    def _known(self, headers: Headers) -> bool:
        door = self._door
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(given.strip(), door.token or ""):
            return True
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(door.cookie)
        except CookieError:
            return False
        return morsel is not None and _same(morsel.value, door.pass_word)

    def _welcome(self, scope: Scope) -> Response:
        """Trade the token for a cookie, and take it out of the address bar."""
        rest = [(key, value) for key, value in _query(scope) if key != "token"]
        answer = RedirectResponse("/" + (f"?{urlencode(rest)}" if rest else ""), 303, {"Cache-Control": "no-store"})
        answer.set_cookie(self._door.cookie, self._door.pass_word, httponly=True, samesite="strict")
        return answer


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": text}, status, headers)


def _query(scope: Scope) -> list[tuple[str, str]]:
    text: str = scope["query_string"].decode("latin-1")
    return parse_qsl(text[:4096], keep_blank_values=True)


def _token_in(scope: Scope) -> str | None:
    return next((value for key, value in _query(scope) if key == "token"), None)


def _host_name(header: str) -> str:
    """A Host header without its port and brackets; nothing for one that is none."""
    found = _HOST.fullmatch(header.strip().lower())
    return "" if found is None else found["six"] or found["name"]


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())

"""The board's gate: the shared one, with a cookie for browsers, GET only unless it may replay, and headers for all."""

import hmac
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise.system import serving
from turnwise.system.addresses import is_everywhere
from turnwise.system.serving import Intake, refuse, same

EVENTS = "/api/events"
TOKEN_ENV = "TURNWISE_BOARD_TOKEN"
_NEEDS_TOKEN = f"this board needs its token: open it once with ?token= and the value of {TOKEN_ENV}"


@dataclass(frozen=True, slots=True)
class BoardAddress:
    """Where a board listens and what opens it: `BoardAddress("127.0.0.1", 7007)`."""

    host: str
    port: int
    token: str | None = None

    @property
    def url(self) -> str:
        """Its address for a browser on this machine, without the token."""
        host = self.host
        if is_everywhere(host):
            host = "::1" if ":" in host else "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def cookie(self) -> str:
        """The cookie's name; a browser sends the cookies of one port to all ports of a host."""
        return f"turnwise_board_{self.port}"

    @property
    def cookie_value(self) -> str:
        """The cookie's value: proof of the token that does not give it away."""
        return hmac.digest((self.token or "").encode(), b"the board's cookie", "sha256").hex()


def content_policy(script_hashes: list[str]) -> str:
    """The CSP: our own files only, and of inline scripts those with one of these hashes."""
    scripts = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in script_hashes)])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


class BoardGate(serving.Gate):
    """ASGI middleware around the whole app."""

    methods: tuple[str, ...] = ("GET", "HEAD")
    open_paths = ()

    def __init__(self, app: ASGIApp, address: BoardAddress, policy: str, *, writes: bool = False) -> None:
        super().__init__(app, address.host, address.token, Intake(body=2**20, calls=4))
        if writes:
            self.methods = (*self.methods, "POST")
        self._address = address
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_headers(MutableHeaders(scope=message), scope["path"])
            await send(message)

        if scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] != EVENTS:
            scope = {**scope, "method": "GET"}  # the server itself leaves the body out, but cannot of a stream
        await super().__call__(scope, receive, with_headers)

    def _add_headers(self, headers: MutableHeaders, path: str) -> None:
        headers["Content-Security-Policy"] = self._policy
        headers["X-Content-Type-Options"] = "nosniff"
        headers["Referrer-Policy"] = "no-referrer"
        headers["Cross-Origin-Resource-Policy"] = "same-origin"
        if path.startswith("/api"):
            headers["Cache-Control"] = "no-store"

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not let through, or that brings the token; None for all others."""
        answer = super().refusal(scope)
        token = self._address.token
        if token is None or (answer is not None and answer.status_code != 401):
            return answer
        brought = _token_in(scope) if scope["path"] == "/" else None
        if brought is not None and same(brought, token):
            return self._welcome(scope)
        if answer is None:
            return None
        text = _NEEDS_TOKEN if brought is None else "that is not this board's token"
        return refuse(401, text, {"WWW-Authenticate": "Bearer"})

    def knows(self, headers: Headers, token: str) -> bool:
        """Those that bear the token, and browsers that have brought it once."""
        if super().knows(headers, token):
            return True
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._address.cookie)
        except CookieError:
            return False
        return morsel is not None and same(morsel.value, self._address.cookie_value)

    def _welcome(self, scope: Scope) -> Response:
        """Trade the token for a cookie, and take it out of the address bar."""
        rest = [(key, value) for key, value in _query(scope) if key != "token"]
        answer = RedirectResponse("/" + (f"?{urlencode(rest)}" if rest else ""), 303, {"Cache-Control": "no-store"})
        answer.set_cookie(self._address.cookie, self._address.cookie_value, httponly=True, samesite="strict")
        return answer


def _query(scope: Scope) -> list[tuple[str, str]]:
    text: str = scope["query_string"].decode("latin-1")
    return parse_qsl(text[:4096], keep_blank_values=True)


def _token_in(scope: Scope) -> str | None:
    return next((value for key, value in _query(scope) if key == "token"), None)

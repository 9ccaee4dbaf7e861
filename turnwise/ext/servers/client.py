"""HTTP to an inference server: JSON in, JSON or a stream of events out, and what each failure means for a turn."""

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx

from turnwise.engines.samplers.endpoint import check_url
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.ext.servers.connections import CONNECT_SECONDS, IDLE_SECONDS, Connections, HttpAnswer
from turnwise.system.addresses import is_loopback

SHOWN = 300
LONGEST = 64 * 2**20
"""Bytes of an event, or of a whole answer: no server has so much to say at once."""
_PASSING = (408, 409, 425, 429)


def server_address(url: str) -> str:
    """Where a server's routes begin, given with or without the /v1 of its OpenAI API; ConfigError for what is none."""
    address = check_url(url, "servers.addresses", "http://127.0.0.1:8000")
    if httpx.URL(address).userinfo:
        raise ConfigError(
            "servers.addresses: no name or password in an address, which the run's folder would keep; the key of "
            "servers that want one is the value of TURNWISE_ENGINE_KEY"
        )
    return address.removesuffix("/v1").rstrip("/")


class ServerClient:
    """EngineLost: the server is gone or overloaded, which may pass. EngineError: it refuses what we ask."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = server_address(url)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key has characters that cannot be sent; is there a line break in it?")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        at = httpx.URL(self.url)
        # A proxy is for other machines. A turn may wait for its place in the server's queue as long as it likes:
        # whether the server is well is asked apart.
        away = not is_loopback(at.host)
        self._client = httpx.AsyncClient(
            headers=headers,
            verify=self.url.startswith("https:"),
            trust_env=away,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_SECONDS),
        )
        proxied = away and bool(getproxies().keys() & {at.scheme, "all"}) and not proxy_bypass(at.host)
        self._connections = None if proxied else Connections(self.url, headers)
        """For turns; None where a proxy is in between, which httpx knows to talk to."""

    async def close(self) -> None:
        """Closes all connections to the server."""
        await self._client.aclose()
        if self._connections is not None:
            await self._connections.close()

    async def ask(
        self, method: str, path: str, body: Any = None, *, seconds: float, params: dict[str, str] | None = None
    ) -> Any:
        """The JSON of an answer; None for an empty one or for plain words."""
        try:
            response = await self._client.request(
                method, self.url + path, json=body, params=params, timeout=httpx.Timeout(seconds)
            )
        except httpx.HTTPError as error:
            raise self._lost(path, error, seconds) from error
        self._check(path, response.status_code, response.text)
        try:
            return json.loads(response.content) if response.content else None
        except (ValueError, RecursionError):
            return None

    async def has(self, path: str, *, seconds: float) -> bool:
        """Whether it has such a route, for whatever method."""
        try:
            response = await self._client.get(self.url + path, timeout=httpx.Timeout(seconds))
        except httpx.HTTPError as error:
            raise self._lost(path, error, seconds) from error
        return response.status_code != 404

    async def write(self, path: str, body: Any) -> dict[str, Any]:
        """The whole answer to a turn, at once; cancelling it closes the connection, which tells the server to stop."""
        content = bytearray()
        async with self._posted(path, body) as answer:
            async for part in answer.body:
                content += part
                self._bound(path, len(content))
        return self._event(path, bytes(content))

    async def stream(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Each event of an answer; closing it early closes the connection, which tells the server to stop."""
        rest = b""
        async with self._posted(path, body) as answer:
            async for part in answer.body:  # to its end, so that the connection serves again
                *whole, rest = (rest + part).split(b"\n")
                self._bound(path, len(rest))
                for line in whole:
                    if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                        yield self._event(path, event)

    @contextlib.asynccontextmanager
    async def _posted(self, path: str, body: Any) -> AsyncIterator[HttpAnswer]:
        """An answer that says that all is well."""
        content = json.dumps(body, allow_nan=False).encode("ascii")
        try:
            if self._connections is not None:
                async with self._connections.post(path, content) as answer:
                    await self._check_answer(path, answer)
                    yield answer
                return
            headers = {"Content-Type": "application/json"}
            async with self._client.stream("POST", self.url + path, content=content, headers=headers) as response:
                async with contextlib.aclosing(_parts(response)) as parts:
                    answer = HttpAnswer(response.status_code, parts)
                    await self._check_answer(path, answer)
                    yield answer
        except (httpx.HTTPError, OSError, EOFError) as error:
            raise self._lost(path, error, None) from error

    async def _check_answer(self, path: str, answer: HttpAnswer) -> None:
        if answer.status == 200:
            return
        text = bytearray()
        async for part in answer.body:
            text += part
            if len(text) > SHOWN:
                break
        self._check(path, answer.status, text.decode("utf-8", "replace"))

    def _bound(self, path: str, length: int) -> None:
        if length > LONGEST:
            raise EngineError(f"{self.url}{path} sends an answer without an end")

    def _event(self, path: str, line: bytes) -> dict[str, Any]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.url}{path} answers something that is not JSON: {line[:SHOWN]!r}") from error
        if not isinstance(event, dict):
            raise EngineError(f"{self.url}{path} answers no JSON object: {line[:SHOWN]!r}")
        if problem := event.get("error"):
            code = problem.get("code") if isinstance(problem, dict) else None
            self._check(path, code if isinstance(code, int) else 500, str(problem))
        return event

    def _check(self, path: str, status: int, text: str) -> None:
        if status == 200:
            return
        problem = f"{self.url}{path} answered {status}: {' '.join(text[:SHOWN].split()) or '(empty body)'}"
        if status >= 500 or status in _PASSING:
            raise EngineLost(problem)
        raise EngineError(problem)

    def _lost(self, path: str, error: Exception, seconds: float | None) -> EngineLost:
        if isinstance(error, httpx.TimeoutException | TimeoutError):
            return EngineLost(f"{self.url}{path} did not answer in {seconds or CONNECT_SECONDS:g} s")
        return EngineLost(f"{self.url}{path}: {f'{type(error).__name__}: {error}'.removesuffix(': ')}")


async def _parts(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    async for part in response.aiter_bytes():
        yield part

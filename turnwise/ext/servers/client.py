"""HTTP to an inference server: JSON in, JSON or a stream of events out, and what each failure means for a turn."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from turnwise.engines.samplers.endpoint import check_url
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.system.addresses import is_loopback

SHOWN = 300
LONGEST_EVENT = 64 * 2**20
"""Bytes of one event: no server has so much to say at once."""
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0
"""An idle connection is not used again after this; servers close theirs after five."""
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
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            verify=self.url.startswith("https:"),
            # A proxy is for other machines. A turn may wait for its place in the server's queue as long as it likes:
            # whether the server is well is asked apart.
            trust_env=not is_loopback(httpx.URL(self.url).host),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_SECONDS),
        )

    async def close(self) -> None:
        """Closes all connections to the server."""
        await self._client.aclose()

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

    async def stream(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Each event of an answer; closing it early closes the connection, which tells the server to stop."""
        content = json.dumps(body, allow_nan=False).encode("ascii")
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.stream("POST", self.url + path, content=content, headers=headers) as answer:
                if answer.status_code != 200:
                    self._check(path, answer.status_code, (await answer.aread()).decode("utf-8", "replace"))
                async for line in self._lines(path, answer):
                    if line == b"[DONE]":
                        return
                    yield self._event(path, line)
        except httpx.HTTPError as error:
            raise self._lost(path, error, None) from error

    async def _lines(self, path: str, answer: httpx.Response) -> AsyncGenerator[bytes, None]:
        """What stands behind each `data:`."""
        rest = b""
        async for chunk in answer.aiter_bytes():
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_EVENT:
                raise EngineError(f"{self.url}{path} sends an event without an end")
            for line in whole:
                if line.startswith(b"data:"):
                    yield line[5:].strip()

    def _event(self, path: str, line: bytes) -> dict[str, Any]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.url}{path} streams something that is not JSON: {line[:SHOWN]!r}") from error
        if not isinstance(event, dict):
            raise EngineError(f"{self.url}{path} streams no JSON object: {line[:SHOWN]!r}")
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

    def _lost(self, path: str, error: httpx.HTTPError, seconds: float | None) -> EngineLost:
        if isinstance(error, httpx.TimeoutException):
            return EngineLost(f"{self.url}{path} did not answer in {seconds or CONNECT_SECONDS:g} s")
        return EngineLost(f"{self.url}{path}: {f'{type(error).__name__}: {error}'.removesuffix(': ')}")

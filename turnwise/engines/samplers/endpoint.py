"""An OpenAI-compatible chat endpoint: messages in, text and tool calls out, with retries that end in a clear error."""

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any

import httpx

from turnwise.config import Config, EngineConfig
from turnwise.engines.opener import Opener
from turnwise.errors import ConfigError, EngineError, EpisodeError
from turnwise.errors.address_passwords import has_userinfo
from turnwise.errors.nearest_name import unknown
from turnwise.system import time_budget
from turnwise.system.retrying import AttemptFailed, RetryPolicy, retry_after, retrying
from turnwise.types import FinishReason

API_KEY_ENV = "OPENAI_API_KEY"
"""The environment variable that holds an endpoint's key."""
SHOWN_BODY = 300
_FINISH = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}
_WRONG_ENDPOINT = (401, 403, 404, 405)


@dataclass(frozen=True, slots=True)
class EndpointReply:
    """One completion. `tool_calls` are (id, name, arguments as JSON text), as the server wrote them."""

    text: str
    tool_calls: list[tuple[str, str, str]]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    model: str
    reasoning: str | None = None
    """What a server with a reasoning parser took out of the text."""


class EndpointOpener(Opener):
    """Of `engine=openai`: it writes messages, and renders them for itself."""

    def connect(self, engine: EngineConfig) -> "ChatEndpoint":
        """A client of the configured endpoint; it must be closed."""
        if engine.base_url is None:
            raise ConfigError(f"engine={engine.name} needs engine.base_url, such as http://127.0.0.1:8000/v1")
        key = os.environ.get(API_KEY_ENV)
        return ChatEndpoint(engine.base_url, engine.model, key, engine.timeout_seconds, engine.retries)

    def describe(self, config: Config) -> str:
        """Which endpoint, which model, and what is not recorded."""
        engine = config.engine
        model = engine.model or "(asked from the endpoint)"
        return (
            f"{engine.name}, {engine.base_url}, model {model}; messages only: no tokens and no log-probs are recorded"
        )


class ChatEndpoint:
    """A client for one endpoint, for many conversations at once.

    EpisodeError: this request failed, after its retries. EngineError: the endpoint is wrong, every request would fail.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
        retries: int = 3,
        *,
        concurrency: int = 64,
        backoff: float = 0.5,
        model_key: str = "engine.model",
    ) -> None:
        """`model_key` is where a person chooses the model."""
        self.base_url = check_url(base_url)
        self.model = model
        self._model_key = model_key
        self._timeout = timeout
        self._retry = RetryPolicy(retries, backoff)
        self._slots = asyncio.Semaphore(concurrency)
        self._client = httpx.AsyncClient(
            headers={"Content-Type": "application/json", **_authorization(api_key)},
            verify=self.base_url.startswith("https:"),  # reading the certificates takes a tenth of a second
            timeout=None,  # httpx limits each read; a whole answer is limited in _attempt
            # _slots bounds the connections: time spent waiting for one must not count as the server's.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
        )

    async def check(self) -> str:
        """Ask for the models served and settle on one; ConfigError lists them when that is not clear."""
        try:
            body = await self._ask("GET", "/models")
            served = [str(entry["id"]) for entry in body["data"]]
        except EpisodeError as error:
            raise EngineError(f"the endpoint cannot be used: {error}") from error
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.base_url}/models does not list models: {_excerpt(body)}") from error
        if self.model is None:
            if len(served) != 1:
                listed = ", ".join(served[:20]) or "none"
                raise ConfigError(
                    f"{self.base_url} serves {len(served)} models ({listed}); choose one with {self._model_key}"
                )
            self.model = served[0]
        elif self.model not in served:
            raise ConfigError(f"{self.base_url}: {unknown('model', self.model, served)}")
        return self.model

    async def complete(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop: list[str] | None = None,
        seed: int | None = None,
    ) -> EndpointReply:
        """Asks the endpoint for one assistant message."""
        request: dict[str, Any] = {
            "model": self.model if self.model is not None else await self.check(),
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
        }
        optional = {"tools": tools or None, "stop": stop or None, "seed": seed}
        request |= {name: value for name, value in optional.items() if value is not None}
        # ASCII escapes, so that a lone surrogate in some tool's output is the server's to judge, not a crash here.
        content = json.dumps(request, allow_nan=False).encode("ascii")
        body = await self._ask("POST", "/chat/completions", content)
        return self._read(body)

    async def close(self) -> None:
        """Closes all connections to the endpoint."""
        await self._client.aclose()

    async def _ask(self, method: str, path: str, content: bytes | None = None) -> Any:
        """The JSON of a response; tried again after what may pass: lost connections, timeouts, 429 and 5xx."""

        async def attempt() -> Any:
            async with time_budget.slot(self._slots):
                return await self._attempt(method, path, content)

        try:
            return await retrying(attempt, self._retry)
        except AttemptFailed as error:
            tries = f" ({error.attempts} tries)" if error.attempts > 1 else ""
            raise EpisodeError(f"{error}{tries}") from error

    async def _attempt(self, method: str, path: str, content: bytes | None = None) -> Any:
        url = self.base_url + path
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.request(method, url, content=content)
        except TimeoutError as error:
            raise AttemptFailed(f"{url} did not answer in {self._timeout:g} s") from error
        except httpx.TransportError as error:
            raise AttemptFailed(f"{url}: {_reason(error)}") from error
        except httpx.HTTPError as error:  # such as a body that cannot be unpacked
            raise EpisodeError(f"{url}: {_reason(error)}") from error
        return _read_json(url, response)

    def _read(self, body: Any) -> EndpointReply:
        """The reply in a response body; what is missing is named."""
        try:
            choice = body["choices"][0]
            message, finish = choice["message"], choice["finish_reason"]
            text, calls = message.get("content"), message.get("tool_calls") or []
            reply_calls = [_read_call(number, call) for number, call in enumerate(calls)]
            reasoning = message.get("reasoning_content") or message.get("reasoning")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EpisodeError(f"{self.base_url} answered without {_missing(error)}: {_excerpt(body)}") from error
        if not isinstance(text, str | None):
            raise EpisodeError(f"{self.base_url} answered with content that is not text: {_excerpt(body)}")
        if not isinstance(finish, str) or finish not in _FINISH:
            raise EpisodeError(f"{self.base_url} ended with finish_reason {finish!r}: {_excerpt(body)}")
        prompt_tokens, completion_tokens = _usage(self.base_url, body)
        return EndpointReply(
            text=text or "",
            tool_calls=reply_calls,
            finish_reason=_FINISH[finish],
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            model=str(body.get("model") or self.model),
            reasoning=reasoning if isinstance(reasoning, str) else None,
        )


def _read_json(url: str, response: httpx.Response) -> Any:
    """The JSON of a good response, or the error a bad one stands for."""
    status = response.status_code
    if status == 200:
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise EpisodeError(
                f"{url} answered with something that is not JSON: {_response_excerpt(response)}"
            ) from error
    problem = f"{url} answered {status}: {_response_excerpt(response)}"
    if status == 429 or status >= 500:
        raise AttemptFailed(problem, retry_after(response.headers.get("Retry-After")))
    if status in _WRONG_ENDPOINT:
        raise EngineError(problem)
    if 300 <= status < 400:
        raise EngineError(f"{url} redirects to {response.headers.get('Location')}; use that address")
    raise EpisodeError(problem)


def _read_call(number: int, call: Any) -> tuple[str, str, str]:
    function = call["function"]
    name, arguments = function["name"], function.get("arguments")
    if not isinstance(name, str):
        raise TypeError("a name of a tool call")
    if not isinstance(arguments, str):  # some servers send the object itself, or null for no arguments
        arguments = "" if arguments is None else json.dumps(arguments)
    return str(call.get("id") or f"call_{number}"), name, arguments


def _usage(base_url: str, body: Any) -> tuple[int, int]:
    usage = body.get("usage")
    match usage:
        case {"prompt_tokens": int(prompt_tokens), "completion_tokens": int(completion_tokens)}:
            return prompt_tokens, completion_tokens
        case _:
            raise EngineError(
                f"{base_url} does not count tokens (usage: {_excerpt(usage)}); budgets and reports need it"
            )


def check_url(base_url: str, key: str = "engine.base_url", like: str = "http://127.0.0.1:8000/v1") -> str:
    """The address without its last slash; ConfigError, under the key that holds it, for what is none, or is not to be
    shown."""
    if has_userinfo(base_url):
        raise ConfigError(f"{key}: no name or password in an address, since it is shown; use environment variables")
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{key}={base_url!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigError(f"{key}={base_url!r} must be like {like}")
    return base_url.rstrip("/")


def _authorization(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key has characters that cannot be sent; is there a line break in it?")
    return {"Authorization": f"Bearer {api_key}"}


def _missing(error: Exception) -> str:
    if isinstance(error, KeyError):
        return str(error)
    return "choices" if isinstance(error, IndexError) else "the expected structure"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _response_excerpt(response: httpx.Response) -> str:
    return response.text[:SHOWN_BODY] or "(empty body)"


def _excerpt(value: Any) -> str:
    try:
        return json.dumps(value)[:SHOWN_BODY]
    except RecursionError:
        return "(nested too deeply to show)"

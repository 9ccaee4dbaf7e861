"""Requests to a judge's endpoints: which model, which endpoint, when to try again, whom to leave alone."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from turnwise.errors import ConfigError, ScoringFailed
from turnwise.ext.judge.budget import Budget
from turnwise.ext.judge.settings import JudgeSettings
from turnwise.ext.judge.stats import JudgeStats
from turnwise.system.retrying import AttemptFailed, RetryPolicy, retry_after, retrying


@dataclass(slots=True)
class Breaker:
    """Closed lets everything pass; open nothing; after `seconds` one request passes and decides."""

    failures: int
    """In a row, that open it."""
    seconds: float
    clock: Callable[[], float] = time.monotonic
    _in_a_row: int = 0
    _opened: float | None = None
    _trying: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the endpoint counts as broken."""
        return self._opened is not None

    @property
    def is_trying(self) -> bool:
        """Whether a request is under way that will decide."""
        return self._trying

    @property
    def allows(self) -> bool:
        """Whether a request may pass now."""
        if self._opened is None:
            return True
        return not self._trying and self.clock() - self._opened >= self.seconds

    def begin(self) -> None:
        """A request that was allowed sets out."""
        self._trying = self._opened is not None

    def succeeded(self) -> None:
        """Counts an answer of the endpoint: the breaker closes, and failures begin at 0 again."""
        self._in_a_row, self._opened, self._trying = 0, None, False

    def failed(self) -> None:
        """The endpoint did not do its work."""
        self._in_a_row += 1
        if self._trying or self._in_a_row >= self.failures:
            self._opened = self.clock()
        self._trying = False

    def abandoned(self) -> None:
        """The request was given up by its caller; nothing was learnt."""
        self._trying = False


SHOWN_BODY = 200
_OWN_FAULT = (400, 413, 414, 415, 422)
"""The request itself cannot be served, by this or any other endpoint."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """What the judge wrote; tokens are None when the server does not count them."""

    text: str
    is_whole: bool
    """False when the token limit cut it off."""
    prompt_tokens: int | None
    completion_tokens: int | None


class EndpointFailed(AttemptFailed):
    """An endpoint did not do its work, which another try or another endpoint may mend."""

    def __init__(self, problem: str, *, wait: float | None = None, is_busy: bool = False) -> None:
        super().__init__(problem, wait)
        self.is_busy = is_busy
        """Healthy, but with too much to do."""


@dataclass(slots=True)
class JudgeEndpoint:
    """One address with its load and its health."""

    url: str
    breaker: Breaker
    in_flight: int = 0
    sent: int = 0
    problem: str = "no request was made yet"
    served: list[str] | None = None
    """The models it serves, once asked."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class JudgeClient:
    """Many requests at once to several endpoints that serve the same model. It belongs to one event loop.

    ScoringFailed: this request got no reply, after its retries. ConfigError: it is not clear which model to ask.
    """

    def __init__(self, settings: JudgeSettings, stats: JudgeStats | None = None) -> None:
        self.settings = settings
        self.stats = stats or JudgeStats()
        self.budget = Budget(settings, self.stats)
        self.endpoints = [
            JudgeEndpoint(url, Breaker(settings.breaker_failures, settings.breaker_seconds)) for url in settings.urls()
        ]
        self._headers = settings.headers()
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._outcome = asyncio.Event()
        self._model = settings.model
        self._finding: asyncio.Task[str] | None = None
        self._http: httpx.AsyncClient | None = None

    async def model(self) -> str:
        """The model to ask, from the settings or from the first endpoint that answers."""
        if self._model is None:
            if self._finding is None or self._finding.done():  # all who come meanwhile wait for the same answer
                self._finding = asyncio.get_running_loop().create_task(self._retrying(self._only_model))
                self._finding.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen by somebody
            self._model = await asyncio.shield(self._finding)
        return self._model

    async def complete(self, body: dict[str, Any]) -> JudgeReply:
        """One reply to a request for /chat/completions."""
        # ASCII escapes, so that a lone surrogate in some tool's output is the server's to judge, not a crash here.
        content = json.dumps(body, allow_nan=False).encode("ascii")

        async def ask(endpoint: JudgeEndpoint) -> JudgeReply:
            if self.settings.model is None and body["model"] not in await self.served(endpoint):
                raise EndpointFailed(f"{endpoint.url} serves {', '.join(endpoint.served or ())}, not {body['model']}")
            started = time.monotonic()
            reply = _read(endpoint.url, await self._send("POST", f"{endpoint.url}/chat/completions", content))
            self.stats.latencies.append(time.monotonic() - started)
            return reply

        reply = await self._retrying(ask, self.budget)
        if reply.prompt_tokens is None or reply.completion_tokens is None:
            self.stats.unmetered_replies += 1
            self.budget.take_tokens(None)
        else:
            self.budget.take_tokens(reply.prompt_tokens + reply.completion_tokens)
            self.stats.prompt_tokens += reply.prompt_tokens
            self.stats.completion_tokens += reply.completion_tokens
        return reply

    async def list_models(self) -> list[str]:
        """The models that the first endpoint to answer serves."""
        return await self._retrying(self.served)

    async def served(self, endpoint: JudgeEndpoint) -> list[str]:
        """The models an endpoint serves; it is asked once."""
        async with endpoint.asking:
            if endpoint.served is None:
                body = await self._send("GET", f"{endpoint.url}/models")
                try:
                    endpoint.served = [str(entry["id"]) for entry in body["data"]]
                except (KeyError, TypeError) as error:
                    raise EndpointFailed(
                        f"{endpoint.url}/models does not list models: {body!r:.{SHOWN_BODY}}"
                    ) from error
            return endpoint.served

    async def close(self) -> None:
        """Closes all connections to the judge's endpoints."""
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)
        if self._http is not None:
            http, self._http = self._http, None
            await http.aclose()

    async def _only_model(self, endpoint: JudgeEndpoint) -> str:
        served = await self.served(endpoint)
        if len(served) != 1:
            listed = ", ".join(served[:20]) or "none"
            raise ConfigError(f"judge: {endpoint.url} serves {len(served)} models ({listed}); choose one with model")
        return served[0]

    async def _retrying(
        self, work: Callable[[JudgeEndpoint], Awaitable[Result]], budget: Budget | None = None
    ) -> Result:
        """Do it at the least loaded healthy endpoint; after what may pass, again, elsewhere if possible."""
        tried: Counter[str] = Counter()

        async def attempt() -> Result:
            try:
                async with self._slots:
                    endpoint = await self._available(tried)
                    if endpoint is None:
                        raise EndpointFailed(self._outage())
                    if budget is not None:
                        budget.take_request()
                    tried[endpoint.url] += 1
                    return await self._at(endpoint, work)
            except EndpointFailed as error:
                following = self._choose(tried)
                error.at_once = following is not None and following.url not in tried
                raise

        try:
            return await retrying(attempt, RetryPolicy(self.settings.retries, self.settings.backoff))
        except EndpointFailed as error:
            tries = f"try {error.attempts} of {self.settings.retries + 1}"
            raise ScoringFailed(f"the judge gave no reply: {error} ({tries})") from error

    async def _available(self, tried: Counter[str]) -> JudgeEndpoint | None:
        """An endpoint to ask, if need be after the request that finds out whether one is well again."""
        while (endpoint := self._choose(tried)) is None and any(
            candidate.breaker.is_trying for candidate in self.endpoints
        ):
            await self._outcome.wait()
        return endpoint

    def _choose(self, tried: Counter[str]) -> JudgeEndpoint | None:
        """Of those that may be asked: the one this request tried least, then with the least under way."""
        allowed = [endpoint for endpoint in self.endpoints if endpoint.breaker.allows]
        return min(
            allowed, key=lambda candidate: (tried[candidate.url], candidate.in_flight, candidate.sent), default=None
        )

    def _outage(self) -> str:
        last = "; ".join(endpoint.problem for endpoint in self.endpoints)
        return f"every endpoint failed {self.settings.breaker_failures} times in a row and is paused: {last}"

    async def _at(self, endpoint: JudgeEndpoint, work: Callable[[JudgeEndpoint], Awaitable[Result]]) -> Result:
        """One try at one endpoint, with its load, health and outcome kept."""
        endpoint.in_flight += 1
        endpoint.sent += 1
        endpoint.breaker.begin()
        self.stats.requests += 1
        is_known = False
        try:
            async with asyncio.timeout(self.settings.timeout):
                result = await work(endpoint)
            endpoint.breaker.succeeded()
            is_known = True
            return result
        except (EndpointFailed, TimeoutError) as error:
            self.stats.failed_requests += 1
            failed = error if isinstance(error, EndpointFailed) else self._too_slow(endpoint)
            endpoint.problem = str(failed)
            if not failed.is_busy:
                endpoint.breaker.failed()
                is_known = True
                if endpoint.breaker.is_open:
                    endpoint.served = None  # whoever comes back may serve something else
            raise failed from error
        except (ScoringFailed, ConfigError):  # the endpoint answered; the fault is the request's
            self.stats.failed_requests += 1
            endpoint.breaker.succeeded()
            is_known = True
            raise
        finally:
            endpoint.in_flight -= 1
            if not is_known:
                endpoint.breaker.abandoned()
            self._outcome.set()  # wakes those in _available
            self._outcome = asyncio.Event()

    def _too_slow(self, endpoint: JudgeEndpoint) -> EndpointFailed:
        return EndpointFailed(f"{endpoint.url} did not answer in {self.settings.timeout:g} s")

    async def _send(self, method: str, url: str, content: bytes | None = None) -> Any:
        """The JSON body of a good response; EndpointFailed for any other."""
        if self._http is None:
            self._http = httpx.AsyncClient(
                headers=self._headers,
                # Reading the certificates takes a tenth of a second.
                verify=any(endpoint.url.startswith("https:") for endpoint in self.endpoints),
                timeout=None,  # a whole answer is limited, not each read
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=self.settings.concurrency),
            )
        try:
            response = await self._http.request(method, url, content=content)
        except httpx.HTTPError as error:  # also a body that cannot be unpacked
            raise EndpointFailed(f"{url}: {type(error).__name__}: {error}".removesuffix(": ")) from error
        return _json(url, response)


def _json(url: str, response: httpx.Response) -> Any:
    status = response.status_code
    body = response.text[:SHOWN_BODY] or "(empty body)"
    if status == 200:
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise EndpointFailed(f"{url} answered with something that is not JSON: {body}") from error
    if 300 <= status < 400:
        raise EndpointFailed(f"{url} redirects to {response.headers.get('Location')}; use that address")
    problem = f"{url} answered {status}: {body}"
    if status in _OWN_FAULT:
        raise ScoringFailed(f"the judge refused the request: {problem}")
    if status in (429, 503):
        wait = retry_after(response.headers.get("Retry-After"))
        raise EndpointFailed(problem, wait=wait, is_busy=status == 429)
    raise EndpointFailed(problem)


def _read(url: str, body: Any) -> JudgeReply:
    """The reply in a response body. A body without one is the endpoint's failure, not a verdict."""
    match body:
        case {"choices": [{"message": {"content": str() | None as text, **message}, **choice}, *_]}:
            usage = body.get("usage")
            counts = usage if isinstance(usage, dict) else {}
            # Servers that take the reasoning out of a reply give it under one of these names.
            thought = message.get("reasoning_content") or message.get("reasoning")
            answer = text or ""  # null: the token limit was reached before the first word of the answer
            return JudgeReply(
                f"<think>\n{thought}\n</think>\n{answer}" if answer and isinstance(thought, str) else answer,
                choice.get("finish_reason") != "length",
                _count(counts.get("prompt_tokens")),
                _count(counts.get("completion_tokens")),
            )
        case _:
            raise EndpointFailed(f"{url} answered without a message: {body!r:.{SHOWN_BODY}}")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None

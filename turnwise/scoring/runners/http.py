"""The `http` runner: a reward server scores; requests and answers are matched by id, and no failure is a zero.

`POST {url}/compute_reward` with `id` (of this request), `instance` (the sample's id), `session` (of this very
episode), `scorer`, `options` and `trajectory` (a row of a trajectory file). The answer repeats `id` and has `reward`
with `parts` and `turns`, or `f2p_count` and `f2p_total`, or `error`. `server.py` beside this file is such a server; it
also answers `GET {url}/scorers` with the options that it takes, so that one it refuses is found before the first step.
"""

import asyncio
import json
import os
import secrets

import httpx
from pydantic import BaseModel, ValidationError

from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError
from turnwise.errors.nearest_name import unknown
from turnwise.scoring.failures import ScoringStats, retry_policy, score_retrying
from turnwise.scoring.scorer import Score, Scorer, ScorerSpec, builtin_scorers
from turnwise.scoring.worker_replies import read_answer
from turnwise.storage.trajectories.rows import to_row
from turnwise.system.retrying import AttemptFailed, retry_after
from turnwise.types import Trajectory

PATH = "/compute_reward"
SERVED = "/scorers"
TOKEN_ENV = "TURNWISE_REWARD_TOKEN"
"""The environment variable that holds the server's token."""
REQUESTS = 32
"""Under way, where `scoring.workers` does not say."""
CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 20.0
FIRST_WAIT = 0.1
MAX_ANSWER = 16 * 1024 * 1024
SESSION = "session"
"""The artifact with the session of an environment that lives on a server; other episodes have none and get a name."""
_LATER = (408, 425, 429)
_FORBIDDEN = (401, 403)


class Served(BaseModel):
    """What our own server says at SERVED: the options that it takes from clients, by scorer."""

    scorers: dict[str, list[str]]


class HttpRunner:
    """Requests to one server, at most `requests` at a time; those that wait to be tried again do not count."""

    def __init__(
        self, url: str, token: str | None, requests: int, timeout: float, retries: int, first_wait: float = FIRST_WAIT
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"scoring.url begins with http:// or https://, not {url!r}")
        if httpx.URL(url).userinfo:
            raise ConfigError(
                f"scoring.url holds no password, because it is shown; the token is read from ${TOKEN_ENV}"
            )
        self.url = url.rstrip("/").removesuffix(PATH)
        self.stats = ScoringStats()
        self._token = token
        self._requests = requests
        self._timeout = timeout
        self._retries = retries
        self.first_wait = first_wait
        self._slots = asyncio.Semaphore(requests)
        self._client: httpx.AsyncClient | None = None
        self._specs: list[ScorerSpec] = []
        self._served: dict[str, list[str]] | None = None
        """None for a server that does not say."""

    def scorer(self, spec: ScorerSpec) -> Scorer:
        """Built-in scorers are checked here; one of the user's own may exist on the server only."""
        if spec.name in builtin_scorers():
            spec.make()
        elif not {":", "."} & set(spec.name):
            raise ConfigError(
                unknown("scorer", spec.name, builtin_scorers()) + " Your own is written as file.py:function."
            )
        self._check(spec)
        self._specs.append(spec)

        async def scorer(trajectory: Trajectory) -> Score:
            sample = trajectory.sample
            request = {
                "id": secrets.token_hex(16),
                "instance": sample.id,
                "session": session_of(trajectory),
                "scorer": spec.name,
                "options": spec.options,
                "trajectory": to_row(trajectory),
            }
            content = json.dumps(request).encode()
            policy = retry_policy(self._retries, self.first_wait)
            return await score_retrying(
                lambda: self._attempt(str(request["id"]), content), policy, self.stats, scorer=spec.name
            )

        scorer.__qualname__ = spec.name
        return scorer

    async def start(self) -> None:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        self._slots = asyncio.Semaphore(self._requests)
        self._client = httpx.AsyncClient(
            headers=headers if self._token is None else {**headers, "Authorization": f"Bearer {self._token}"},
            verify=self.url.startswith("https:"),  # reading the certificates takes a tenth of a second
            timeout=httpx.Timeout(None, connect=min(CONNECT_SECONDS, self._timeout)),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS),  # _slots bounds them
            trust_env=False,  # a proxy that the environment names must not see the samples
        )
        self._served = await self._ask_served()
        for spec in self._specs:
            self._check(spec)

    async def stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _ask_served(self) -> dict[str, list[str]] | None:
        """What the server takes; None when it is not one of ours, or not there yet, which scoring will say."""
        try:
            status, _, answer = await self._ask("GET", SERVED, b"", min(CONNECT_SECONDS, self._timeout))
        except AttemptFailed:
            return None
        if status in _FORBIDDEN:
            raise ConfigError(f"the reward server {self.url}: the token is wrong or missing: {_short(answer)}")
        try:
            return Served.model_validate_json(answer).scorers if status == 200 else None
        except ValidationError:
            return None

    def _check(self, spec: ScorerSpec) -> None:
        if self._served is None:
            return
        allowed = self._served.get(spec.name)
        if allowed is None:
            hint = unknown("scorer", spec.name, self._served)
            raise ConfigError(f"the reward server {self.url} does not serve it: {hint}")
        for key in spec.options:
            if key not in allowed:
                takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
                raise ConfigError(
                    f"the reward server {self.url} does not take the option {key!r} of scorer {spec.name} from clients "
                    f"({takes}): leave it out here, and have it set where the server is started"
                )

    async def _attempt(self, request_id: str, content: bytes) -> Score:
        async with self._slots:  # waiting for it is not the server's time
            with self.stats.timed():
                status, wait, answer = await self._ask("POST", PATH, content, self._timeout)
        if status in _LATER or status >= 500:
            raise AttemptFailed(f"the reward server {self.url} answers {status}: {_short(answer)}", wait)
        if not 200 <= status < 300:  # the same request would be refused again: a person must look at it
            raise ConfigError(f"the reward server {self.url} refuses the request with {status}: {_short(answer)}")
        return read_answer(answer, request_id).score()

    async def _ask(self, method: str, path: str, content: bytes, seconds: float) -> tuple[int, float | None, bytes]:
        """(HTTP status, seconds the server asks to wait, content)."""
        if self._client is None:
            raise RuntimeError("the scoring client is not running")
        answer = bytearray()
        try:
            async with asyncio.timeout(seconds):
                async with self._client.stream(method, self.url + path, content=content) as response:
                    async for piece in response.aiter_raw():
                        answer += piece
                        if len(answer) > MAX_ANSWER:
                            raise AttemptFailed(f"the reward server {self.url} sent more than {MAX_ANSWER} bytes")
        except TimeoutError as error:
            raise AttemptFailed(f"the reward server {self.url} did not answer within {seconds:g} s") from error
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__} {error}".strip()
            raise AttemptFailed(f"no answer from the reward server {self.url}: {problem}") from error
        return response.status_code, retry_after(response.headers.get("Retry-After")), bytes(answer)


def session_of(trajectory: Trajectory) -> str:
    """The session of the episode's environment, or else a name that no other episode of the run has."""
    session = trajectory.artifacts.get(SESSION)
    if isinstance(session, str) and session:
        return session
    return f"{trajectory.sample.id}/{trajectory.step}/{trajectory.sibling}"


def _short(content: bytes) -> str:
    """The beginning of a server's words, on one line."""
    return " ".join(content[:400].decode("utf-8", "replace").split())[:300]


def make(config: ScoringConfig) -> HttpRunner:
    """The runner for `scoring.run=http`."""
    if config.url is None:
        raise ConfigError("scoring.run=http needs scoring.url, the address of the reward server")
    if config.workers < 0 or config.timeout <= 0 or config.retries < 0:
        raise ConfigError("scoring.workers and scoring.retries must not be negative, scoring.timeout must be positive")
    token = os.environ.get(TOKEN_ENV)
    return HttpRunner(config.url, token, config.workers or REQUESTS, config.timeout, config.retries)

"""How a judge is reached and asked: the options that every scorer with a judge takes."""

import dataclasses
import enum
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from turnwise.errors import ConfigError
from turnwise.errors.address_passwords import has_userinfo
from turnwise.errors.nearest_name import unknown
from turnwise.ext.judge.environment import judge_addresses

DEFAULT_URL = "http://localhost:18901/v1"
REASON_TOKENS = 240
BUDGETS = ("max_requests", "max_tokens_total")


class WhenSpent(enum.StrEnum):
    """What becomes of a trajectory that the budget does not reach for."""

    leave_out = "leave_out"
    """It has no reward and says why, as with every failure of scoring; scoring.max_failures ends the run in time."""
    stop = "stop"
    """The run ends at once; resumed, it has as much again."""


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """How a judge is reached and asked: `JudgeSettings(base_urls=("http://10.0.0.7:18901/v1",), votes=3)`.

    The schema of `scoring.options.judge`, which a config holds as a plain mapping.
    """

    base_urls: tuple[str, ...] = ()
    """Endpoints that serve the same model; empty takes LLM_AS_A_JUDGE_BASE (comma separated), else localhost:18901."""
    model: str | None = None
    """The model's name there; null asks the endpoint at first use, which must then serve exactly one."""
    api_key_env: str = "VLLM_API_KEY"
    """The environment variable that holds the key; without it none is sent."""
    timeout: float = 60.0
    """Seconds for one request."""
    retries: int = 4
    """How often a request is tried again after what may pass: lost connections, timeouts, 429, 5xx, garbage."""
    backoff: float = 0.5
    """Seconds before the first new try; doubled each time, with jitter."""
    concurrency: int = 32
    """Requests under way at once, over all endpoints."""
    votes: int = 1
    """Verdicts asked for, an odd number; the majority counts."""
    asks: int = 3
    """How often one vote is asked for until the reply is one of the allowed verdicts."""
    temperature: float = 0.0
    """Above 0 only to make several votes differ."""
    seed: int = 0
    """Of the first vote; the next one has the next."""
    max_tokens: int = 16
    """Of one reply; a reason has REASON_TOKENS more."""
    explain: bool = False
    """Ask for a reason in a sentence or two before the verdict; it is recorded with the score."""
    max_pixels: int = 1_048_576
    """Larger images are scaled down to this."""
    max_images: int = 8
    """Images in one request, those that are judged before those of the question; it says how many are left out."""
    cache: str | None = None
    """A local folder where verdicts are kept, by the content of the request; take another when the served weights
    change under the same name."""
    max_requests: int | None = None
    """Requests for a verdict that a run may send, each try counted; null has no limit."""
    max_tokens_total: int | None = None
    """Tokens, read and written, after which no further request is sent; those under way may go beyond it."""
    when_spent: WhenSpent = WhenSpent.leave_out
    """What becomes of what cannot be asked any more; never a score of 0."""
    breaker_failures: int = 5
    """Failures in a row after which an endpoint is left alone."""
    breaker_seconds: float = 15.0
    """For how long; then one request tries it."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as {chat_template_kwargs: {enable_thinking: false}}."""

    def __post_init__(self) -> None:
        for url in self.base_urls:
            _check_url(url)
        if self.votes < 1 or self.votes % 2 == 0:
            raise ConfigError(f"judge: votes={self.votes} must be odd, so that a majority can be found")
        for name in ("concurrency", "asks", "max_tokens", "max_pixels", "max_images", "breaker_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"judge: {name}={getattr(self, name)} must be at least 1")
        for name in BUDGETS:
            if (most := getattr(self, name)) is not None and most < 1:
                raise ConfigError(f"judge: {name}={most} must be at least 1")
        for name in ("retries", "backoff", "breaker_seconds", "temperature"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"judge: {name}={getattr(self, name)} must not be negative")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"judge: timeout={self.timeout} must be above 0")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "JudgeSettings":
        """The settings of config options, checked."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in names:
                raise ConfigError(f"judge: {unknown('option', key, names)}")
        values = dict(options)
        if isinstance(values.get("base_urls"), str):  # base_urls=http://host/v1 means a list of one
            values["base_urls"] = tuple(split_urls(values["base_urls"]))
        try:
            return _adapter().validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"judge: {where}={first['input']!r:.80}: {first['msg']}") from error

    @property
    def key(self) -> str:
        """A text that is equal for equal settings, as key of a cache."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def urls(self) -> tuple[str, ...]:
        """The endpoints: those named, or the environment's, or the default; each once."""
        urls = self.base_urls or judge_addresses() or (DEFAULT_URL,)
        for url in urls:
            _check_url(url)
        return tuple(dict.fromkeys(url.rstrip("/") for url in urls))

    def headers(self) -> dict[str, str]:
        """The HTTP headers of every request to the judge, the API key among them."""
        key = os.environ.get(self.api_key_env)
        if not key:
            return {"Content-Type": "application/json"}
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"judge: ${self.api_key_env} has characters that cannot be sent; a line break?")
        return {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}


@functools.cache
def _adapter() -> TypeAdapter[JudgeSettings]:
    return TypeAdapter(JudgeSettings)


def split_urls(text: str) -> list[str]:
    """Addresses separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _check_url(text: str) -> None:
    if has_userinfo(text):
        raise ConfigError(
            "judge: no name or password in an address: put the key into the variable that api_key_env names"
        )
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ConfigError(f"judge: the address {text!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"judge: the address {text!r} must be like {DEFAULT_URL}")

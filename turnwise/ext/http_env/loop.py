"""The loop of an environment over HTTP: POST /start_sample, /interact and /cancel, with the session in a header.

The environment gives the first messages and the tools, and answers every message.
"""

import asyncio
import itertools
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from pydantic import Field

from turnwise.config import Config
from turnwise.data.prompts import read_prompt
from turnwise.data.values import FieldError
from turnwise.engines.samplers.endpoint import check_url
from turnwise.errors import ConfigError, EpisodeError, PluginError
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.environments import Observation, Opening, play
from turnwise.rollout.loops.loading import Loop
from turnwise.rollout.openai_messages import assistant_entry
from turnwise.rollout.plugin_options import read_settings
from turnwise.rollout.toolbox.schema import check_schema
from turnwise.scoring.event_loop_resources import loop_resource
from turnwise.system import time_budget
from turnwise.system.retrying import AttemptFailed, RetryPolicy, retry_after, retrying
from turnwise.types import Image, JsonSchema, Message, Sample

WHO = "http_env"
SESSION = "session_id"
KEY = "Idempotency-Key"
"""Sent with each request; a server that sends it back keeps its answers, so that a lost one can be asked for again."""
SHOWN_BODY = 300
MOST_BYTES = 16 * 2**20
MOST_TOOLS = 128
KEPT_SCHEMAS = 4096
POOL = 16
"""Connections kept in one pool."""
_WRONG = (401, 403, 405)
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True, slots=True)
class HttpEnvOptions:
    """The options of the loop: `rollout.agent_options={url: http://127.0.0.1:18950}`. Rows name no address."""

    url: str
    """The environment server; `/start_sample` and the others are added."""
    token_env: str = "TURNWISE_ENV_TOKEN"
    """The environment variable that holds its token; without it none is sent."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    """Seconds for one answer."""
    retries: Annotated[int, Field(ge=0)] = 3
    """How often a request that surely was not served is sent again."""
    concurrency: Annotated[int, Field(ge=1)] = 256
    """Requests under way at once, over all sessions."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "HttpEnvOptions":
        """The options of a config, checked."""
        if "url" not in options:
            raise ConfigError(f"agent loop {WHO!r} needs rollout.agent_options={{url: http://127.0.0.1:18950}}")
        settings = read_settings(cls, dict(options), f"agent loop {WHO!r}")
        check_url(settings.url, f"agent loop {WHO!r}: url")
        return settings


class EnvironmentClient:
    """The connections of one event loop to one server, for any number of sessions."""

    def __init__(self, options: HttpEnvOptions) -> None:
        self.url = options.url.rstrip("/")
        self._timeout = options.timeout
        self._retry = RetryPolicy(options.retries, first_wait=0.25)
        self._slots = asyncio.Semaphore(options.concurrency)
        self._keeps_answers = False
        """Whether the server has said that it does."""
        self._schemas: dict[str, JsonSchema] = {}
        token = os.environ.get(options.token_env)
        if token and not (token.isascii() and token.isprintable()):
            raise ConfigError(f"${options.token_env} has characters that cannot be sent; is there a line break in it?")
        # A pool looks at all of its connections whenever a request comes or goes: many small ones cost far less.
        secure = httpx.create_ssl_context() if self.url.startswith("https:") else False
        self._pools = [
            httpx.AsyncClient(
                headers={"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})},
                verify=secure,
                timeout=None,  # a whole answer is limited, not each read
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=POOL),
            )
            for _ in range(-(-options.concurrency // POOL))
        ]
        self._next = itertools.cycle(self._pools)

    @classmethod
    def shared(cls, options: HttpEnvOptions) -> "EnvironmentClient":
        """The one of the running event loop; `close_loop_resources` closes it."""
        return loop_resource(cls, options, lambda: cls(options))

    async def close(self) -> None:
        """Closes all connections to the server."""
        for pool in self._pools:
            await pool.aclose()

    async def post(self, path: str, body: object, session: str | None = None) -> tuple[dict[str, Any], str | None]:
        """(the JSON object of the answer, the session it names); EpisodeError when there is none."""
        content = json.dumps(body, allow_nan=False).encode("ascii")
        headers = {KEY: uuid.uuid4().hex, **({} if session is None else {SESSION: session})}

        async def attempt() -> tuple[dict[str, Any], str | None]:
            async with time_budget.slot(self._slots):
                return await self._attempt(path, content, headers)

        try:
            return await retrying(attempt, self._retry)
        except AttemptFailed as error:
            tries = f" ({error.attempts} tries)" if error.attempts > 1 else ""
            raise EpisodeError(f"{WHO}: {error}{tries}") from error

    def tools(self, entries: Any) -> list[JsonSchema]:
        """The schemas that a server sent, the same objects for the same ones: renderers know a tool by identity."""
        if not isinstance(entries, list) or len(entries) > MOST_TOOLS:
            raise EpisodeError(f"{WHO}: {self.url} gave tools that are not a list of at most {MOST_TOOLS}")
        schemas: list[JsonSchema] = []
        for schema in entries:
            key = json.dumps(schema, sort_keys=True)
            if key not in self._schemas:
                try:
                    check_schema(schema if isinstance(schema, dict) else {}, "of the environment")
                except PluginError as error:
                    raise EpisodeError(f"{WHO}: {self.url}: {error}") from error
                if len(self._schemas) >= KEPT_SCHEMAS:
                    self._schemas.clear()
                self._schemas[key] = schema
            schemas.append(self._schemas[key])
        return schemas

    async def _attempt(self, path: str, content: bytes, headers: dict[str, str]) -> tuple[dict[str, Any], str | None]:
        url = self.url + path
        try:
            async with asyncio.timeout(self._timeout):
                status, sent_headers, answer = await self._read(url, content, headers)
        except TimeoutError as error:
            raise self._lost(f"{url} did not answer in {self._timeout:g} s") from error
        except _NOT_SENT as error:
            raise AttemptFailed(f"{url}: {_reason(error)}") from error
        except httpx.HTTPError as error:
            raise self._lost(f"{url}: {_reason(error)}") from error
        self._keeps_answers = self._keeps_answers or sent_headers.get(KEY) == headers[KEY]
        if status == 200:
            return _object(url, answer), sent_headers.get(SESSION)
        problem = f"{url} answered {status}: {answer[:SHOWN_BODY].decode('utf-8', 'replace') or '(empty body)'}"
        if status in (429, 503):  # it says that it did not serve the request
            raise AttemptFailed(problem, retry_after(sent_headers.get("Retry-After")))
        if status >= 500:
            raise self._lost(problem)
        if status in _WRONG or 300 <= status < 400:
            raise ConfigError(f"agent loop {WHO!r}: {problem}")
        raise EpisodeError(f"{WHO}: {problem}")

    async def _read(self, url: str, content: bytes, headers: dict[str, str]) -> tuple[int, httpx.Headers, bytes]:
        async with next(self._next).stream("POST", url, content=content, headers=headers) as response:
            body = bytearray()
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MOST_BYTES:
                    raise EpisodeError(f"{WHO}: {url} answered with more than {MOST_BYTES} bytes")
            return response.status_code, response.headers, bytes(body)

    def _lost(self, problem: str) -> Exception:
        """A request that may have been served: asked again only where the server keeps its answers."""
        return AttemptFailed(problem) if self._keeps_answers else EpisodeError(f"{WHO}: {problem}")


class HttpEnvironment:
    """One session. It is cancelled unless the server has finished it, also when the answer to the start came late."""

    def __init__(self, client: EnvironmentClient, sample: Sample) -> None:
        self._client, self._sample = client, sample
        self._starting: asyncio.Task[tuple[dict[str, Any], str | None]] | None = None
        self._session: str | None = None
        self._finished = False
        self._total: float | None = None

    async def start(self) -> Opening:
        """Which sample of the server's: `name` and `index` of the row's extra_info."""
        extra = self._sample.info.get("extra_info", {})
        name, index = extra.get("name"), extra.get("index")
        if not isinstance(name, str) or index is None:
            raise EpisodeError(f"{WHO}: sample {self._sample.id} needs extra_info.name and extra_info.index")
        # A task of its own, which a cancelled episode does not take along: its session could not be cancelled.
        self._starting = asyncio.ensure_future(self._client.post("/start_sample", {"index": index, "name": name}))
        body, session = await asyncio.shield(self._starting)
        if not session or len(session) > 1000 or not session.isascii():  # a header that could not be sent back
            raise EpisodeError(f"{WHO}: {self._client.url}/start_sample names no session in the header {SESSION}")
        self._session = session
        messages = self._messages(body.get("messages")) or list(self._sample.prompt)
        tools = await asyncio.to_thread(self._client.tools, body.get("tools") or [])  # schemas may take their time
        return Opening(messages, tools, _metrics(body))

    async def step(self, message: Message) -> Observation:
        entry = assistant_entry(message.visible, message.tool_calls)
        body, _ = await self._client.post("/interact", {"messages": [entry]}, self._session)
        finished = body.get("finish")
        if not isinstance(finished, bool):
            raise EpisodeError(f"{WHO}: {self._client.url}/interact: finish is {finished!r:.80}, not true or false")
        self._finished = finished
        reward = body.get("reward")
        if reward is not None:
            self._total = reward = _number(reward, "reward")
        return Observation(self._messages(body.get("messages")), finished, reward, self._total, _metrics(body))

    async def close(self) -> None:
        # No limit over all of it: a request that waits for its turn behind many others must still be sent.
        try:
            if self._starting is not None and self._session is None:
                session = (await self._starting)[1]
                self._session = session if session and session.isascii() else None
            if self._session is not None and not self._finished:
                await self._client.post("/cancel", {}, self._session)
        except (EpisodeError, ConfigError) as error:
            if self._session is not None:  # else it never began, and whoever started it knows why
                raise EpisodeError(str(error)) from error

    def _messages(self, entries: Any) -> list[Message]:
        if entries is None or entries == []:
            return []
        try:
            messages, images = read_prompt(entries, "messages", None)
        except FieldError as error:
            raise EpisodeError(f"{WHO}: {self._client.url}: {error.field}: {error.problem}") from error
        if any(not _is_data(image) for image in images):  # a path or an address would have us open it
            raise EpisodeError(f"{WHO}: {self._client.url} gave an image that is not a data URL")
        return list(messages)


def _is_data(image: Image) -> bool:
    return image.source.startswith("data:")


def _object(url: str, answer: bytes) -> dict[str, Any]:
    try:
        body = json.loads(answer)
    except (ValueError, RecursionError) as error:
        excerpt = answer[:SHOWN_BODY].decode("utf-8", "replace")
        raise EpisodeError(f"{WHO}: {url} answered with something that is not JSON: {excerpt}") from error
    if not isinstance(body, dict):
        raise EpisodeError(f"{WHO}: {url} answered with a {type(body).__name__}, not an object")
    return body


def _metrics(body: dict[str, Any]) -> dict[str, float]:
    metrics = body.get("metrics") or {}
    if not isinstance(metrics, dict) or len(metrics) > 1000:
        raise EpisodeError(f"{WHO}: metrics are numbers by name, not {metrics!r:.80}")
    return {str(name): _number(value, f"metric {name!r:.40}") for name, value in metrics.items()}


def _number(value: Any, what: str) -> float:
    if isinstance(value, int | float) and abs(value) < 1e300:  # not nan, not infinity
        return float(value)
    raise EpisodeError(f"{WHO}: {what} is {value!r:.80}, not a finite number")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class HttpEnvLoop:
    """Plays the sample `extra_info.name` and `index` of the server `rollout.agent_options.url`."""

    def for_run(self, config: Config) -> Loop:
        """The loop of the configured server."""
        options = HttpEnvOptions.of(config.rollout.agent_options)

        async def play_http(chat: Conversation) -> None:
            await play(chat, HttpEnvironment(EnvironmentClient.shared(options), chat.sample))

        return play_http


http_env = HttpEnvLoop()

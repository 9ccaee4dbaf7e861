"""The `retrieve` tool: passages from a retrieval service over HTTP, asked as verl's SearchTool asks.

POST {"queries", "topk", "return_scores"} to the service's address, which is named by whoever configures the tool or by
the environment, never by a row.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field

from turnwise.errors import ConfigError, EpisodeError, PluginError, ToolError
from turnwise.rollout.plugin_options import read_settings
from turnwise.rollout.tools.tool import DEFAULT_CONCURRENCY, ToolContext, ToolSession
from turnwise.system.retrying import AttemptFailed, RetryPolicy, retry_after, retrying
from turnwise.types import JsonSchema, ToolResult

URL_ENV = "TURNWISE_RETRIEVAL_URL"
TOKEN_ENV = "TURNWISE_RETRIEVAL_TOKEN"
"""The environment variables that hold the service's address and, where it wants one, its token."""
MOST_QUERIES = 16
LONGEST_QUERY = 2000
MOST_BYTES = 8_000_000
"""Of one answer."""
CONNECT_SECONDS = 10.0
BETWEEN = "\n---\n"
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})


class RetrieveSettings(BaseModel):
    """`config` of an entry {name: retrieve} in a file of tools; verl's words where it has one."""

    model_config = ConfigDict(extra="forbid")

    retrieval_service_url: str
    topk: int = Field(default=3, ge=1, le=100)
    timeout: float = Field(default=30.0, gt=0)
    """Seconds for one attempt."""
    retries: int = Field(default=4, ge=0, le=100)


@dataclass(slots=True)
class RetrieveTool:
    """A retrieval client: `RetrieveTool(url="http://127.0.0.1:8000/retrieve")`, or an entry of a file of tools."""

    name: str = "retrieve"
    url: str | None = None
    """None takes it from the environment."""
    topk: int = 3
    seconds: float = 30.0
    """For one attempt."""
    retries: int = 4
    timeout: float = 120.0
    """For a call with all its attempts."""
    concurrency: int = DEFAULT_CONCURRENCY
    first_wait: float = 0.5
    _client: httpx.AsyncClient | None = None
    _users: int = 0

    def __post_init__(self) -> None:
        if self.url is not None:
            check_url(self.url)

    @property
    def schema(self) -> JsonSchema:
        query = {"type": "string", "maxLength": LONGEST_QUERY}
        queries = {"type": "array", "items": query, "minItems": 1, "maxItems": MOST_QUERIES}
        about = "Search for passages about each of the queries."
        parameters = {"type": "object", "properties": {"query_list": queries}, "required": ["query_list"]}
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    @property
    def address(self) -> str:
        """Where the service is; PluginError when nobody said."""
        url = self.url or os.environ.get(URL_ENV)
        if not url:
            raise PluginError(f"the tool {self.name} needs the address of a retrieval service: set {URL_ENV}")
        return check_url(url)

    def configured(self, config: Mapping[str, Any], folder: Path) -> "RetrieveTool":
        """A client of its own: {retrieval_service_url: ..., topk: 5}."""
        read = read_settings(RetrieveSettings, config, f"config of {self.name}")
        return RetrieveTool(self.name, read.retrieval_service_url, read.topk, read.timeout, read.retries)

    async def start(self) -> str:
        """Opens the HTTP client of the retrieval service, once for all users."""
        self._users += 1
        address = self.address
        if self._client is None:
            token = os.environ.get(TOKEN_ENV)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            limits = httpx.Limits(max_connections=self.concurrency)
            times = httpx.Timeout(self.seconds, connect=CONNECT_SECONDS)
            self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=times)
        return f"the retrieval service at {address}"

    async def stop(self) -> None:
        self._users -= 1
        if self._users == 0 and self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def open(self, context: ToolContext) -> ToolSession:
        if self._client is None:
            raise EpisodeError(f"the tool {self.name} was not started")
        return _RetrieveSession(self, self._client)

    async def ask(self, client: httpx.AsyncClient, queries: list[str]) -> list[list[dict[str, Any]]]:
        """What the service finds for each query; ToolError says why there is nothing."""
        address = self.address
        payload = {"queries": queries, "topk": self.topk, "return_scores": True}

        async def attempt() -> bytes:
            try:
                async with client.stream("POST", address, json=payload) as response:
                    if response.status_code in _LATER:
                        wait = retry_after(response.headers.get("retry-after"))
                        raise AttemptFailed(f"it answered {response.status_code}", wait)
                    if response.status_code != httpx.codes.OK:
                        raise ToolError(f"the retrieval service answered {response.status_code}")
                    return await _body(response)
            except httpx.TransportError as error:
                raise AttemptFailed(f"{type(error).__name__}: {error}".rstrip(": ")) from error

        try:
            body = await retrying(attempt, RetryPolicy(self.retries, self.first_wait))
        except AttemptFailed as error:
            raise ToolError(f"the retrieval service failed {error.attempts} times: {error}") from error
        return await asyncio.to_thread(_read, body, len(queries))


@dataclass(slots=True)
class _RetrieveSession:
    tool: RetrieveTool
    client: httpx.AsyncClient

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        results = await self.tool.ask(self.client, arguments["query_list"])
        ids = [str(document["id"]) for documents in results for document in documents if "id" in document]
        return ToolResult(passages(results), info={"ids": ids})

    async def close(self) -> None:
        return None


def check_url(url: str) -> str:
    """The address; ConfigError for one that is none, or that holds a password, since it is shown."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the address of a retrieval service: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"the address of a retrieval service begins with http:// or https://, not {url[:80]!r}")
    if parsed.userinfo:
        raise ConfigError(f"the address of a retrieval service holds no password; its token is read from ${TOKEN_ENV}")
    return url


async def _body(response: httpx.Response) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MOST_BYTES:
            raise ToolError(f"the retrieval service answered with more than {MOST_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _read(body: bytes, queries: int) -> list[list[dict[str, Any]]]:
    """The documents of each query: with their scores around them, or bare."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the retrieval service's answer is not JSON: {error}") from error
    results = answer.get("result") if isinstance(answer, dict) else None
    if (
        not isinstance(results, list)
        or len(results) != queries
        or not all(isinstance(entry, list) for entry in results)
    ):
        raise ToolError(f'the retrieval service\'s answer has no {{"result": [...]}} with {queries} lists of documents')
    return [[_document(item) for item in documents] for documents in results]


def _document(item: Any) -> dict[str, Any]:
    document = item.get("document", item) if isinstance(item, dict) else None
    if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
        raise ToolError('the retrieval service\'s answer holds a document without {"contents": text}')
    return document


def passages(results: list[list[dict[str, Any]]]) -> str:
    """What the model reads: JSON with the passages of all queries."""
    text = BETWEEN.join(_shown(documents) for documents in results) if any(results) else "No search results found."
    return json.dumps({"result": text}, ensure_ascii=False)


def _shown(documents: list[dict[str, Any]]) -> str:
    """A title is the first line of a document."""
    split = [document["contents"].partition("\n") for document in documents]
    return "\n\n".join(f"Doc {n} (Title: {title})\n{text}" for n, (title, _, text) in enumerate(split, 1)).strip()


retrieve = RetrieveTool()

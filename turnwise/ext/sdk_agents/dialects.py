"""A dialect over HTTP: bodies are read, replies sent whole or streamed, refusals in the shape that its clients read."""

import asyncio
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from turnwise.ext.sdk_agents.calls import ClientReply, Refused, read_body

LARGE = 1 << 18
"""Bytes of a body from which on it is read in a thread: others wait for the event loop."""
NO_RETRY = {"x-should-retry": "false"}
"""Both SDKs try again after a 5xx otherwise."""


async def read_request(request: Request) -> dict[str, Any]:
    """The JSON object of a request's body."""
    body = await request.body()
    return read_body(body) if len(body) < LARGE else await asyncio.to_thread(read_body, body)


def respond(dialect: ModuleType, reply: ClientReply, api_request: Any) -> Response:
    """The reply as the request wants it."""
    if api_request.stream:  # the whole turn is there already: its events go out together
        return Response("".join(dialect.stream(reply, api_request)), media_type="text/event-stream")
    return JSONResponse(dialect.write(reply, api_request))


def answering(
    answer: Callable[[Request], Awaitable[Response]], dialect: ModuleType
) -> Callable[[Request], Awaitable[Response]]:
    """Refusals in the shape that the dialect's clients read."""

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except Refused as refused:
            return JSONResponse(dialect.write_error(refused), refused.status, NO_RETRY)

    return answered

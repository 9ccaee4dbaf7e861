"""The server that clients speak to: one beside a run, on this machine only; a session's address is its secret."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import ModuleType
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnwise.ext.sdk_agents import anthropic_messages, openai_chat, openai_responses
from turnwise.ext.sdk_agents.calls import Refused
from turnwise.ext.sdk_agents.dialects import NO_RETRY, answering, read_request, respond
from turnwise.ext.sdk_agents.sessions import ClientSession
from turnwise.rollout import plugin_calls
from turnwise.system.serving import Gate, Intake, serving_beside
from turnwise.types import Message, Role

HOST = "127.0.0.1"
INTAKE = Intake(calls=1 << 20, values=400_000)
"""Episodes are counted by `rollout.concurrency`; a call of theirs waits for the engine and not for a place here. What
it brings is read where all episodes wait, so it has fewer values than other servers take."""


@dataclass(slots=True)
class ClientServer:
    """The sessions by their tokens, and where they are served."""

    port: int = 0
    sessions: dict[str, ClientSession] = field(default_factory=dict)
    _beginning: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def in_turn(self) -> None:
        """Let the loop see to its connections before the next agent begins: making an SDK's client takes long, and many
        in a row would keep the first ones waiting beyond their timeouts."""
        async with self._beginning:
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def open(self, session: ClientSession) -> AsyncIterator[str]:
        """The base URL of a session while the block runs; nobody reaches it before or after."""
        token = secrets.token_urlsafe(24)
        self.sessions[token] = session
        try:
            yield f"http://{HOST}:{self.port}/s/{token}/v1"
        finally:
            del self.sessions[token]
            await session.close()

    def find(self, request: Request) -> ClientSession:
        """The session of a request's address."""
        session = self.sessions.get(request.path_params["token"])
        if session is None:
            raise Refused("there is no such session: its episode has ended", status=404, code="episode_ended")
        return session


@dataclass(slots=True)
class _Running:
    """A server with those who use it; the last one stops it."""

    server: ClientServer
    stack: contextlib.AsyncExitStack
    users: int = 0
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


_running: WeakKeyDictionary[asyncio.AbstractEventLoop, _Running] = WeakKeyDictionary()


@contextlib.asynccontextmanager
async def client_server() -> AsyncIterator[ClientServer]:
    """The server of this event loop: started for the first who asks, stopped after the last. A run holds it throughout,
    so that it is the same for all of its episodes."""
    loop = asyncio.get_running_loop()
    running = _running.setdefault(loop, _Running(ClientServer(), contextlib.AsyncExitStack()))
    running.users += 1
    try:
        async with running.changing:
            if not running.server.port:
                app = Gate(make_app(running.server), HOST, None, INTAKE)
                running.server.port = await running.stack.enter_async_context(serving_beside(app, HOST))
        yield running.server
    finally:
        running.users -= 1
        if not running.users:
            async with running.changing:
                if not running.users:  # nobody came while we waited
                    running.server.port = 0
                    _running.pop(loop, None)  # its lock holds the loop, which would never be forgotten
                    await plugin_calls.to_the_end(running.stack.aclose())


def make_app(server: ClientServer) -> Starlette:
    """Both dialects under `/s/TOKEN/v1`. Anthropic's SDK adds /v1 itself, so it may stand there twice."""

    async def models(request: Request) -> Response:
        server.find(request)
        return JSONResponse({"object": "list", "data": [openai_chat.model_entry("policy")]})

    async def count(request: Request) -> Response:
        session = server.find(request)
        call, _ = anthropic_messages.read(await read_request(request))
        return JSONResponse({"input_tokens": await asyncio.to_thread(session.count, call)})

    chat, messages = _endpoint(server, openai_chat), _endpoint(server, anthropic_messages)
    counted = answering(count, anthropic_messages)
    routes = [
        Route("/s/{token}/v1/models", answering(models, openai_chat)),
        Route("/s/{token}/v1/chat/completions", chat, methods=["POST"]),
        Route("/s/{token}/v1/responses", _responses(server), methods=["POST"]),
        Route("/s/{token}/v1/messages", messages, methods=["POST"]),
        Route("/s/{token}/v1/v1/messages", messages, methods=["POST"]),
        Route("/s/{token}/v1/messages/count_tokens", counted, methods=["POST"]),
        Route("/s/{token}/v1/v1/messages/count_tokens", counted, methods=["POST"]),
        Route("/{path:path}", _nothing, methods=["GET", "POST", "DELETE"]),
    ]
    return Starlette(routes=routes)


def _endpoint(server: ClientServer, dialect: ModuleType) -> Callable[[Request], Awaitable[Response]]:
    """A turn of the policy, asked for and given in a dialect."""

    async def answer(request: Request) -> Response:
        session = server.find(request)
        with session.answering():
            call, api_request = dialect.read(await read_request(request))
            return respond(dialect, await session.reply(call), api_request)

    return answering(answer, dialect)


def _responses(server: ClientServer) -> Callable[[Request], Awaitable[Response]]:
    """The same in the dialect whose calls may go on from an earlier response by its name."""

    async def answer(request: Request) -> Response:
        session = server.find(request)
        with session.answering():
            call, pending = openai_responses.read(await read_request(request), session.kept, session.items)
            reply = await session.reply(call)
        if pending.request.store:
            session.kept[pending.id] = (*pending.messages, Message(Role.ASSISTANT, reply.text, reply.calls))
            session.items |= {item["id"]: item for item in openai_responses.output_items(reply, pending)}
        return respond(openai_responses, reply, pending)

    return answering(answer, openai_responses)


async def _nothing(request: Request) -> Response:
    refused = Refused(
        f"nothing is served at {request.url.path.rpartition('/')[2]!r} here", status=404, code="not_found"
    )
    dialect = anthropic_messages if "anthropic-version" in request.headers else openai_chat
    return JSONResponse(dialect.write_error(refused), refused.status, NO_RETRY)

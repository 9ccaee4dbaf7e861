"""A small environment server: a number to guess and a shop with tools, to try an environment over HTTP.

`python examples/http_env/server.py --port 18950` serves POST /start_sample, /interact and /cancel, and
GET /health, which counts the sessions.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from turnwise.errors import ConfigError
from turnwise.ext.http_env.loop import KEY, SESSION, HttpEnvOptions
from turnwise.system.addresses import check_binding
from turnwise.system.serving import Gate, Intake, serve_app

MOST_SESSIONS = 20_000
IDLE_SECONDS = 900.0
"""After which a session that nobody asks is forgotten."""
MOST_STEPS = 12
_NUMBER = re.compile(r"[0-9]{1,9}")
_HIGHEST = 100


class AssistantCall(BaseModel):
    """A call in an assistant's message."""

    id: str
    function: dict[str, str]


class AssistantMessage(BaseModel):
    """An assistant's message, as a client sends it."""

    model_config = ConfigDict(extra="ignore")

    content: str | None = None
    tool_calls: list[AssistantCall] = []


class StartRequest(BaseModel):
    """The body of /start_sample: which sample of which game to play."""

    index: int
    name: str


class InteractRequest(BaseModel):
    """What the assistant said; the last message counts."""

    messages: list[AssistantMessage]


@dataclass(slots=True)
class ServerAnswer:
    """What the server says to a message."""

    messages: list[dict[str, Any]]
    finish: bool
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Game(Protocol):
    """A game that a session plays: it starts, and answers messages."""

    def start(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(the first messages, the tools)."""
        ...

    def answer(self, message: AssistantMessage) -> ServerAnswer: ...


class GuessNumber:
    """A number from 1 to 100; the reward is 1 for finding it, less 0.05 for each guess after the first."""

    def __init__(self, index: int) -> None:
        self._number, self._guesses = random.Random(f"guess/{index}").randint(1, _HIGHEST), 0

    def start(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        text = f"I think of a number from 1 to {_HIGHEST}. Write your guess as a number; I say higher or lower."
        return [{"role": "user", "content": text}], []

    def answer(self, message: AssistantMessage) -> ServerAnswer:
        numbers = _NUMBER.findall((message.content or "")[-1000:])
        self._guesses += 1
        if numbers and int(numbers[-1]) == self._number:
            reward = max(0.0, 1.0 - 0.05 * (self._guesses - 1))
            return ServerAnswer([_user("Right!")], True, reward, {"guesses": 1.0, "won": 1.0})
        if self._guesses >= MOST_STEPS:
            return ServerAnswer([_user("No more guesses.")], True, 0.0, {"guesses": 1.0, "won": 0.0})
        if not numbers:
            return ServerAnswer([_user("Please write a number.")], False, None, {"guesses": 1.0, "no_number": 1.0})
        hint = "Higher." if int(numbers[-1]) < self._number else "Lower."
        return ServerAnswer([_user(hint)], False, None, {"guesses": 1.0})


class Shop:
    """Buy one item with the money there is: tools to look and to buy, a reward for the right purchase."""

    PRICES = (("pen", 3), ("cup", 5), ("map", 7), ("hat", 12))

    def __init__(self, index: int) -> None:
        self._wanted, self._price = self.PRICES[index % len(self.PRICES)]
        self._steps = 0

    def start(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        text = f"Buy me a {self._wanted} and pay exactly what it costs."
        return [_user(text)], [
            _tool("price", "What one item costs, in dollars.", {"item": "string"}),
            _tool("buy", "Buy one item for so many dollars.", {"item": "string", "dollars": "integer"}),
        ]

    def answer(self, message: AssistantMessage) -> ServerAnswer:
        self._steps += 1
        messages = []
        for call in message.tool_calls:
            text, reward = self._run(call)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if reward is not None:
                return ServerAnswer(messages, True, reward, {"steps": 1.0, "bought": 1.0})
        if not message.tool_calls:
            messages.append(_user("Please use the tools."))
        ended = self._steps >= MOST_STEPS
        return ServerAnswer(messages, ended, 0.0 if ended else None, {"steps": 1.0})

    def _run(self, call: AssistantCall) -> tuple[str, float | None]:
        prices = dict(self.PRICES)
        try:
            arguments = json.loads(call.function.get("arguments") or "{}")
            item = arguments["item"]
            if call.function.get("name") == "price":
                return (str(prices[item]) if item in prices else f"no {item}"), None
            return "Bought.", float(item == self._wanted and arguments["dollars"] == self._price)
        except (ValueError, KeyError, TypeError) as error:
            return f"Error: {type(error).__name__}: {error}", None


GAMES: dict[str, type[GuessNumber] | type[Shop]] = {"guess": GuessNumber, "shop": Shop}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _tool(name: str, about: str, parameters: dict[str, str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in parameters.items()}}
    function = {"name": name, "description": about, "parameters": {**schema, "required": list(parameters)}}
    return {"type": "function", "function": function}


@dataclass(slots=True)
class _Session:
    game: Game
    used: float
    last: tuple[str, dict[str, Any]] | None = None
    """The key of the last request and its answer: one that was lost is given again."""


class Sessions:
    """The games under way; finished, cancelled and forgotten ones are gone."""

    def __init__(self) -> None:
        self.open: dict[str, _Session] = {}
        self.counts = {"started": 0, "finished": 0, "cancelled": 0, "forgotten": 0}
        self._ended: dict[str, tuple[str, dict[str, Any]]] = {}

    def start(self, request: StartRequest) -> tuple[str, dict[str, Any]] | None:
        """(session, body), or None when there are too many."""
        self._forget()
        if len(self.open) >= MOST_SESSIONS:
            return None
        game, name = GAMES[request.name](request.index), uuid.uuid4().hex
        messages, tools = game.start()
        self.open[name] = _Session(game, time.monotonic())
        self.counts["started"] += 1
        return name, {"messages": messages, "tools": tools, "metrics": {}}

    def interact(self, name: str, key: str, message: AssistantMessage) -> dict[str, Any] | None:
        """The body, or None for a session that is not open."""
        if name in self._ended and key and self._ended[name][0] == key:
            return self._ended[name][1]
        session = self.open.get(name)
        if session is None:
            return None
        session.used = time.monotonic()
        if session.last is not None and key and session.last[0] == key:
            return session.last[1]
        answer = session.game.answer(message)
        body = {
            "messages": answer.messages,
            "finish": answer.finish,
            "reward": answer.reward,
            "metrics": answer.metrics,
        }
        session.last = (key, body)
        if answer.finish:
            self.close(name, "finished")
            self._ended[name] = session.last
            if len(self._ended) > MOST_SESSIONS:
                del self._ended[next(iter(self._ended))]
        return body

    def close(self, name: str, how: str) -> None:
        if self.open.pop(name, None) is not None:
            self.counts[how] += 1

    def _forget(self) -> None:
        oldest = time.monotonic() - IDLE_SECONDS
        for name in [name for name, session in self.open.items() if session.used < oldest]:
            self.close(name, "forgotten")


def make_app(token: str | None = None, host: str = "127.0.0.1") -> FastAPI:
    """The server's app at this host."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, host=host, token=token, intake=Intake(body=2**20, calls=4096))
    sessions = app.state.sessions = Sessions()

    def reply(request: Request, body: dict[str, Any], status: int = 200, session: str = "") -> JSONResponse:
        headers = {SESSION: session} if session else {}
        return JSONResponse(body, status, {**headers, KEY: request.headers.get(KEY, "")})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"sessions": len(sessions.open), **sessions.counts}

    @app.post("/start_sample")
    async def start_sample(request: Request, sample: StartRequest) -> JSONResponse:
        if sample.name not in GAMES:
            return reply(request, {"error": f"no environment {sample.name!r}; there are {', '.join(GAMES)}"}, 404)
        started = sessions.start(sample)
        if started is None:
            return reply(request, {"error": "as many sessions are open as this server keeps"}, 503)
        return reply(request, started[1], session=started[0])

    @app.post("/interact")
    async def interact(
        request: Request, interaction: InteractRequest, session_id: str = _SESSION_HEADER
    ) -> JSONResponse:
        if not interaction.messages:
            return reply(request, {"error": "messages is empty"}, 422)
        body = sessions.interact(session_id, request.headers.get(KEY, ""), interaction.messages[-1])
        return reply(request, {"error": "no such session"}, 404) if body is None else reply(request, body)

    @app.post("/cancel")
    async def cancel(request: Request, session_id: str = _SESSION_HEADER) -> JSONResponse:
        sessions.close(session_id, "cancelled")
        return reply(request, {})

    return app


_SESSION_HEADER: Any = Header(alias=SESSION)


def main() -> None:
    """Serves the environments until interrupted."""
    parser = argparse.ArgumentParser(description="A small environment server: a number to guess, and a shop.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=18950)
    args = parser.parse_args()
    variable = HttpEnvOptions("http://127.0.0.1").token_env
    token = os.environ.get(variable) or None
    try:
        check_binding(args.host, token, "an environment server", "plays", f" in {variable}")
        sys.stderr.write(f"environments {', '.join(GAMES)} on http://{args.host}:{args.port} until interrupted\n")
        asyncio.run(serve_app(make_app(token, args.host), args.host, args.port))
    except ConfigError as error:
        sys.exit(f"small_environment: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

"""A reward server: the contract of the `http` runner, to serve scorers from another machine and as a template."""

import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, ValidationError

from turnwise.choices import ScoringRun
from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, TurnwiseError, unknown
from turnwise.plugins import load
from turnwise.scoring.scorer import BUILTIN, Scorer, ScorerSpec
from turnwise.scoring.service import Runner, make_runner
from turnwise.scoring.telling import Told, tell, told_error
from turnwise.serving import check_binding, serve_app
from turnwise.storage.trajectory_rows import from_row
from turnwise.types import Trajectory

KEPT_SCORERS = 256
"""Made scorers, by name and options; a client that sends ever new options must not fill the memory."""
RETRY_SECONDS = "1"


@dataclass(frozen=True, slots=True)
class RewardServerSettings:
    """How a server is made: `RewardServerSettings(scorers=("gsm8k", "my_rewards:exact"))`."""

    scorers: tuple[str, ...] = tuple(sorted(BUILTIN))
    """All that it serves. A scorer is code: clients choose among these and name no other."""
    body: int = 64 * 1024 * 1024
    """Bytes of one request."""
    calls: int = 256
    """Requests in progress; more are asked to come again."""


class RewardRequest(BaseModel):
    """What `POST /compute_reward` takes. `instance` and `session` are for servers that keep the environment."""

    model_config = ConfigDict(strict=True)

    id: str
    scorer: str
    trajectory: dict[str, Any]
    options: dict[str, Any] = {}
    instance: str = ""
    session: str = ""


async def serve(
    host: str,
    port: int,
    token: str | None = None,
    settings: RewardServerSettings | None = None,
    config: ScoringConfig | None = None,
) -> None:
    """Serve until interrupted; the scorers run in a pool unless the config says otherwise."""
    check_binding(host, token, "a reward server", "scores")
    app = make_app(make_runner(config or ScoringConfig(run=ScoringRun.pool)), token, settings)
    await serve_app(app, host, port)


def make_app(runner: Runner, token: str | None = None, settings: RewardServerSettings | None = None) -> FastAPI:
    """The server's app; the runner is started and stopped with it."""
    settings = settings or RewardServerSettings()
    scorers = _Scorers(runner, settings.scorers)
    calls = 0

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await runner.start()
            yield
        finally:
            await runner.stop()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.post("/compute_reward")
    async def compute_reward(request: Request) -> Response:
        nonlocal calls
        _check_token(request, token)  # before anything is read
        if calls >= settings.calls:
            text = "as many requests are being answered as this server takes; try again"
            raise HTTPException(429, text, {"Retry-After": RETRY_SECONDS})
        calls += 1
        try:
            asked, trajectory = _read(await _body(request, settings.body))
            told = await _answer(scorers, asked, trajectory)
        finally:
            calls -= 1
        content = json.dumps({"id": asked.id, "session": asked.session, **told})
        return Response(content, media_type="application/json")

    return app


async def _answer(scorers: "_Scorers", asked: RewardRequest, trajectory: Trajectory) -> Told:
    """What the scorer says; its exception is an answer too, which the client raises as its own."""
    try:
        scorer = scorers.get(ScorerSpec(asked.scorer, asked.options))
    except TurnwiseError as error:
        return {"error": told_error(error)}
    return await tell(scorer, trajectory)


class _Scorers:
    """Scorers made so far, by name and options."""

    def __init__(self, runner: Runner, served: Sequence[str]) -> None:
        self._runner = runner
        self._served = served
        self._made: dict[str, Scorer] = {}
        for name in served:
            if name not in BUILTIN:
                load(name, "scorer")  # one that is not there is found now

    def get(self, spec: ScorerSpec) -> Scorer:
        if spec.name not in self._served:
            raise ConfigError(f"this reward server does not serve it: {unknown('scorer', spec.name, self._served)}")
        key = json.dumps([spec.name, spec.options], sort_keys=True)
        if key not in self._made:
            if len(self._made) >= KEPT_SCORERS:
                self._made.clear()
            self._made[key] = self._runner.scorer(spec)
        return self._made[key]


def _check_token(request: Request, token: str | None) -> None:
    if token is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), token.encode()):
        raise HTTPException(401, "this server needs its token", {"WWW-Authenticate": "Bearer"})


async def _body(request: Request, most: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise HTTPException(413, f"a request has at most {most} bytes", {"Connection": "close"})
    return bytes(body)


def _read(body: bytes) -> tuple[RewardRequest, Trajectory]:
    """The request and its trajectory. json reads what a row may hold and strict JSON not: NaN, lone surrogates."""
    try:
        asked = RewardRequest.model_validate(json.loads(body))
        return asked, from_row(asked.trajectory)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        raise HTTPException(422, f"{'.'.join(map(str, fault['loc']))[:80]}: {fault['msg'][:200]}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HTTPException(422, f"not a trajectory: {type(error).__name__}: {str(error)[:200]}") from error

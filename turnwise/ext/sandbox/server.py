"""An HTTP server for our own sandbox: SandboxFusion's two calls, and sessions that remember."""

import asyncio
from dataclasses import dataclass, field

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from turnwise.ext.sandbox import probe
from turnwise.ext.sandbox.http_schemas import (
    CallRequest,
    OpenAnswer,
    OpenRequest,
    ReportAnswer,
    ResultAnswer,
    RunCodeAnswer,
    RunCodeRequest,
    RunJupyterAnswer,
    RunJupyterRequest,
    RunStatus,
)
from turnwise.ext.sandbox.limits import MIB, Limits
from turnwise.ext.sandbox.open_sessions import OpenSessions
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.scripts import run_notebook, run_script
from turnwise.ext.sandbox.session import LocalSession
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.system.addresses import check_binding
from turnwise.system.serving import RETRY_SECONDS, Gate, Intake, serve_app

LOST = "the sandbox was lost in the middle of the call, which says nothing about the code"
MOST_BODIES = 16
"""Requests of the largest size whose images open sessions may hold together; they are in memory until they close."""
OUTPUT = 100_000
"""Of a server's sessions: graders compare whole outputs, which the usual limit would cut."""


def _pool_settings() -> PoolSettings:
    return PoolSettings(limits=Limits(output=OUTPUT))


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server is made: `ServerSettings(sessions=64)`. No config has these: they are the operator's."""

    pool: PoolSettings = field(default_factory=_pool_settings)
    body: int = 64 * MIB
    """Bytes of one request."""
    body_seconds: float = 60.0
    """Within which all of it must have come."""
    calls: int = 256
    """In progress, those that wait for a core included; more are turned away. Each ends with its client."""
    sessions: int = 1024
    """Open at once."""
    idle_seconds: float = 900.0
    """Without a call, after which a session is closed."""
    seconds: float = 300.0
    """The most that one call may ask for."""


async def serve(host: str, port: int, token: str | None = None, settings: ServerSettings | None = None) -> None:
    """Serves a sandbox pool over HTTP until interrupted."""
    check_binding(host, token, "a sandbox server", "runs code")
    settings = settings or ServerSettings()
    async with SandboxPool(settings.pool) as pool:
        await serve_app(make_app(pool, token, settings, host), host, port)


def make_app(
    pool: SandboxPool, token: str | None, settings: ServerSettings | None = None, host: str = "127.0.0.1"
) -> FastAPI:
    """The server's app at this host, for a pool that has been started in the same event loop."""
    settings = settings or ServerSettings(pool=pool.settings)
    sessions = OpenSessions[_Held](settings.sessions, settings.idle_seconds)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lambda _: sessions.swept())
    intake = Intake(settings.body, settings.body_seconds, settings.calls)
    app.add_middleware(Gate, host=host, token=token, intake=intake)
    app.add_exception_handler(RequestValidationError, invalid)
    add_basics(app, pool)
    _add_fusion(app, pool, settings)
    _add_sessions(app, pool, sessions, settings)
    return app


def as_json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(by_alias=True), media_type="application/json")


async def invalid(_: Request, error: Exception) -> Response:
    """What is wrong and where, without the input, which may be long."""
    assert isinstance(error, RequestValidationError)
    faults = [
        f"{'.'.join(str(part)[:80] for part in fault['loc'])}: {fault['msg'][:200]}" for fault in error.errors()[:8]
    ]
    return JSONResponse({"detail": "; ".join(faults)}, status_code=422)


def add_basics(app: FastAPI, pool: SandboxPool) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/report")
    async def report() -> Response:
        if pool.report is None:
            raise HTTPException(503, "nothing has been proven yet")
        return as_json(ReportAnswer(level=pool.report.level.name, text=_words(pool.report)))  # type: ignore[arg-type]


def _words(report: probe.SandboxReport) -> str:
    """The report without details, which name files of this machine."""
    lines = [f"sandbox level {report.level.name}, proven by {len(report.proofs)} attacks: {', '.join(report.layers)}"]
    lines += [f"  {'blocked' if proof.blocked else 'OPEN   '}  {proof.attack.name}" for proof in report.proofs]
    lines += [f"  refused: {refusal}" for refusal in report.refusals]
    return "\n".join(lines)


def _add_fusion(app: FastAPI, pool: SandboxPool, settings: ServerSettings) -> None:
    limits = pool.settings.limits

    @app.post("/run_code")
    async def run_code(request: RunCodeRequest) -> Response:
        try:
            async with pool.session() as session:
                return as_json(await run_script(session, request, limits, settings.seconds))
        except SandboxLost:
            return as_json(RunCodeAnswer(status=RunStatus.SandboxError, message=LOST))

    @app.post("/run_jupyter")
    async def run_jupyter(request: RunJupyterRequest) -> Response:
        try:
            async with pool.session() as session:
                return as_json(await run_notebook(session, request, limits, settings.seconds))
        except SandboxLost:
            return as_json(RunJupyterAnswer(status=RunStatus.SandboxError, message=LOST))


def _add_sessions(app: FastAPI, pool: SandboxPool, sessions: "OpenSessions[_Held]", settings: ServerSettings) -> None:
    @app.post("/sessions")
    async def open_session(request: OpenRequest) -> Response:
        return as_json(OpenAnswer(id=_opened(pool, request, sessions, settings)))

    @app.post("/sessions/{number}/run")
    async def run(number: str, request: CallRequest) -> Response:
        with sessions.using(number) as held:
            session = held.session
            try:
                limit = min(request.seconds or session.limits.seconds, settings.seconds)
                return as_json(ResultAnswer.model_construct(await session.run(request.code, limit)))
            except SandboxLost as error:
                await sessions.close(number)  # its variables are gone: the client must not go on as if they were there
                raise HTTPException(410, LOST) from error
            except asyncio.CancelledError:  # the client went away: it must not find the session without its variables
                await sessions.close(number)
                raise

    @app.delete("/sessions/{number}")
    async def close(number: str) -> Response:
        await sessions.close(number)
        return Response(status_code=204)


@dataclass(frozen=True, slots=True)
class _Held:
    """A session, and the bytes of the images that it has in memory."""

    session: LocalSession
    images: int

    async def close(self) -> None:
        await self.session.close()


def _opened(pool: SandboxPool, request: OpenRequest, sessions: "OpenSessions[_Held]", settings: ServerSettings) -> str:
    sessions.check_room()
    size = sum(len(image.data) for image in request.images)
    if size and size + sum(held.images for held in sessions) > MOST_BODIES * settings.body:
        text = "open sessions hold as many images as this server takes"
        raise HTTPException(429, text, {"Retry-After": RETRY_SECONDS})
    try:
        session = pool.session(seed=request.seed, images=request.images, stateless=request.stateless)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    return sessions.add(_Held(session, size))

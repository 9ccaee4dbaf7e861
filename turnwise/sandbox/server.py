"""An HTTP server for our own sandbox: SandboxFusion's two calls, and sessions that remember."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from turnwise.sandbox import probe
from turnwise.sandbox.fusion import (
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
from turnwise.sandbox.limits import MIB, Limits
from turnwise.sandbox.pool import PoolSettings, SandboxPool
from turnwise.sandbox.process import SandboxLost
from turnwise.sandbox.scripts import run_notebook, run_script
from turnwise.sandbox.session import LocalSession
from turnwise.serving import RETRY_SECONDS, Gate, Intake, check_binding, serve_app

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
    """Serve until interrupted."""
    check_binding(host, token, "a sandbox server", "runs code")
    settings = settings or ServerSettings()
    async with SandboxPool(settings.pool) as pool:
        await serve_app(make_app(pool, token, settings, host), host, port)


def make_app(
    pool: SandboxPool, token: str | None, settings: ServerSettings | None = None, host: str = "127.0.0.1"
) -> FastAPI:
    """The server's app at this host, for a pool that has been started in the same event loop."""
    settings = settings or ServerSettings(pool=pool.settings)
    sessions = _Sessions(pool, settings)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lambda _: sessions.swept())
    intake = Intake(settings.body, settings.body_seconds, settings.calls)
    app.add_middleware(Gate, host=host, token=token, intake=intake)
    app.add_exception_handler(RequestValidationError, invalid)
    add_basics(app, pool)
    _add_fusion(app, pool, settings)
    _add_sessions(app, sessions, settings)
    return app


def as_json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(by_alias=True), media_type="application/json")


async def invalid(_: Request, error: Exception) -> Response:
    """What is wrong and where, without the input, which may be long."""
    assert isinstance(error, RequestValidationError)
    faults = [f"{'.'.join(str(part)[:80] for part in one['loc'])}: {one['msg'][:200]}" for one in error.errors()[:8]]
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


def _words(report: probe.Report) -> str:
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


def _add_sessions(app: FastAPI, sessions: "_Sessions", settings: ServerSettings) -> None:
    @app.post("/sessions")
    async def open_session(request: OpenRequest) -> Response:
        return as_json(OpenAnswer(id=sessions.open(request)))

    @app.post("/sessions/{number}/run")
    async def run(number: str, request: CallRequest) -> Response:
        with sessions.using(number) as session:
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


@dataclass(slots=True)
class _Entry:
    session: LocalSession
    last: float
    """When it was used."""
    size: int
    """Bytes of its images."""
    running: int = 0


class _Sessions:
    """The open sessions by their ids, which nobody can guess."""

    def __init__(self, pool: SandboxPool, settings: ServerSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._entries: dict[str, _Entry] = {}

    def open(self, request: OpenRequest) -> str:
        if len(self._entries) >= self._settings.sessions:
            text = f"{self._settings.sessions} sessions are open, as many as this server takes"
            raise HTTPException(429, text, {"Retry-After": RETRY_SECONDS})
        images = request.images
        size = sum(len(image.data) for image in images)
        if size and size + sum(entry.size for entry in self._entries.values()) > MOST_BODIES * self._settings.body:
            text = "open sessions hold as many images as this server takes"
            raise HTTPException(429, text, {"Retry-After": RETRY_SECONDS})
        try:
            session = self._pool.session(seed=request.seed, images=images, stateless=request.stateless)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        number = secrets.token_urlsafe(24)
        self._entries[number] = _Entry(session, time.monotonic(), size)
        return number

    @contextlib.contextmanager
    def using(self, number: str) -> Iterator[LocalSession]:
        """A session, which does not expire meanwhile."""
        entry = self._entries.get(number)
        if entry is None:
            raise HTTPException(404, "there is no such session; it may have expired")
        entry.running += 1
        try:
            yield entry.session
        finally:
            entry.running -= 1
            entry.last = time.monotonic()

    async def close(self, number: str) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            await entry.session.close()

    @contextlib.asynccontextmanager
    async def swept(self) -> AsyncIterator[None]:
        """While the app lives: idle sessions are closed; afterwards all are."""
        sweeping = asyncio.ensure_future(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await asyncio.wait((sweeping,))
            for number in list(self._entries):
                await self.close(number)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.idle_seconds / 4)
            oldest = time.monotonic() - self._settings.idle_seconds
            for number, entry in list(self._entries.items()):
                if not entry.running and entry.last < oldest:
                    await self.close(number)

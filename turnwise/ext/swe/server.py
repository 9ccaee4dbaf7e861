"""An HTTP server of repositories in shell sessions: start_instance, process_action, postprocess, compute_reward."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Response
from fastapi.exceptions import RequestValidationError

from turnwise.errors import DataError
from turnwise.ext.sandbox.limits import MIB
from turnwise.ext.sandbox.open_sessions import OpenSessions
from turnwise.ext.sandbox.pool import PoolSettings
from turnwise.ext.sandbox.server import add_basics, as_json, invalid
from turnwise.ext.sandbox.shell.pool import ShellPool
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.ext.swe.actions import BadAction, check_action
from turnwise.ext.swe.repository import LocalWorkspace, run_tests
from turnwise.ext.swe.wire import (
    ActionAnswer,
    ActionRequest,
    EndAnswer,
    EndRequest,
    RewardAnswer,
    StartAnswer,
    SweRewardRequest,
    SweStartRequest,
)
from turnwise.system.addresses import check_binding
from turnwise.system.serving import RETRY_SECONDS, Gate, Intake, serve_app

LOST = "the repository's session was lost, which says nothing about the policy"


@dataclass(frozen=True, slots=True)
class SweServerSettings:
    """How a server is made: `SweServerSettings(sessions=64)`. No config has these: they are the operator's."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    body: int = 16 * MIB
    body_seconds: float = 60.0
    calls: int = 256
    sessions: int = 512
    """Open at once, those whose reward was not asked for included."""
    idle_seconds: float = 1800.0
    """Without a request, after which a session is forgotten."""
    test_seconds: float = 60.0


async def serve(host: str, port: int, token: str | None = None, settings: SweServerSettings | None = None) -> None:
    """Serves repositories over HTTP until interrupted."""
    check_binding(host, token, "a server of repositories", "runs code")
    settings = settings or SweServerSettings()
    async with ShellPool(settings.pool) as pool:
        await serve_app(make_app(pool, token, settings, host), host, port)


def make_app(
    pool: ShellPool, token: str | None, settings: SweServerSettings | None = None, host: str = "127.0.0.1"
) -> FastAPI:
    """The server's app at this host, for a pool that has been started in the same event loop."""
    settings = settings or SweServerSettings()
    sessions = OpenSessions[_Entry](settings.sessions, settings.idle_seconds)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lambda _: sessions.swept())
    intake = Intake(settings.body, settings.body_seconds, settings.calls)
    app.add_middleware(Gate, host=host, token=token, intake=intake)
    app.add_exception_handler(RequestValidationError, invalid)
    add_basics(app, pool)
    _add_actions(app, pool, sessions)
    _add_reward(app, sessions, pool, settings)
    return app


def _add_actions(app: FastAPI, pool: ShellPool, sessions: "OpenSessions[_Entry]") -> None:
    @app.post("/start_instance")
    async def start_instance(request: SweStartRequest) -> Response:
        if request.instance is None:
            raise HTTPException(404, f"this server knows no repository {request.instance_id!r}: send its files")
        sessions.check_room()
        try:
            workspace = LocalWorkspace(pool, request.instance)
        except DataError as error:
            raise HTTPException(422, str(error)) from error
        return as_json(StartAnswer(sid=sessions.add(_Entry(workspace))))

    @app.post("/process_action")
    async def process_action(request: ActionRequest) -> Response:
        with sessions.using(request.sid) as entry:
            if entry.ended:
                raise HTTPException(409, "this session was ended by /postprocess")
            try:
                check_action(request.action.name, request.action.arguments)
                observation = await entry.workspace.act(request.action.name, request.action.arguments)
            except BadAction as error:
                return as_json(ActionAnswer(observation=str(error), failed=True))
            except SandboxLost as error:
                await sessions.close(request.sid)
                raise HTTPException(410, LOST) from error
            except asyncio.CancelledError:  # the client went away: nobody knows what became of the action
                await sessions.close(request.sid)
                raise
            entry.note(observation.facts)
            return as_json(
                ActionAnswer(
                    observation=observation.text,
                    failed=observation.failed,
                    done=observation.done,
                    facts=observation.facts,
                )
            )

    @app.post("/postprocess")
    async def postprocess(request: EndRequest) -> Response:
        with sessions.using(request.sid) as entry:
            entry.ended = True
            await entry.workspace.close()
            return as_json(EndAnswer(changed=sorted(entry.changes or {})))


def _add_reward(app: FastAPI, sessions: "OpenSessions[_Entry]", pool: ShellPool, settings: SweServerSettings) -> None:
    @app.post("/compute_reward")
    async def compute_reward(request: SweRewardRequest) -> Response:
        with sessions.using(request.sid) as entry:
            if request.tests is None:
                raise HTTPException(422, "this server knows no tests: send them")
            tests, changes = request.tests, entry.changes
            if changes is None:  # more than is kept: it cannot be judged, and does not pass
                none = RewardAnswer(
                    f2p_count=0, f2p_total=len(set(tests.FAIL_TO_PASS)), p2p_total=len(set(tests.PASS_TO_PASS))
                )
                return as_json(none)
            try:
                outcome = await run_tests(pool, entry.workspace.instance, changes, tests, settings.test_seconds)
            except SandboxLost as error:
                raise HTTPException(503, LOST, {"Retry-After": RETRY_SECONDS}) from error
            return as_json(
                RewardAnswer(
                    f2p_count=outcome.f2p_count, f2p_total=outcome.f2p_total,
                    p2p_count=outcome.p2p_count, p2p_total=outcome.p2p_total,
                )
            )  # fmt: skip


@dataclass(slots=True)
class _Entry:
    """A repository that a client works on, and what was changed in it."""

    workspace: LocalWorkspace
    changes: dict[str, str | None] | None = field(default_factory=dict)
    """Since the start; None when they are too many to keep."""
    ended: bool = False

    async def close(self) -> None:
        await self.workspace.close()

    def note(self, facts: dict[str, Any]) -> None:
        if "changes" in facts:
            self.changes = facts["changes"]
        elif "too_much" in facts or "refused" in facts:
            self.changes = None

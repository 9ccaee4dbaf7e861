"""A reward server: the contract of the `http` runner, to serve scorers from another machine and as a template.

Nothing that a client sends is imported, opened, reached or looked up in the environment: it chooses among the scorers
that are served, and sets the options that each of them takes from clients (`scoring/client_options.py`).
"""

import contextlib
import functools
import json
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from turnwise.config import ScoringConfig
from turnwise.config.choices import ScoringRun
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.errors.nearest_name import unknown
from turnwise.scoring.client_options import check_client_options, declared_options
from turnwise.scoring.runners.wire import WireResult, error_to_json, score_to_wire
from turnwise.scoring.scorer import KEPT_SCORERS, Scorer, ScorerSpec, builtin_scorers
from turnwise.scoring.service import Runner, make_runner
from turnwise.storage.trajectories.rows import from_row
from turnwise.system.addresses import check_binding
from turnwise.system.extras import without_extra
from turnwise.types import Trajectory

try:
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.responses import JSONResponse

    from turnwise.system.serving import Gate, Intake, serve_app
except ModuleNotFoundError as error:
    raise without_extra("a reward server", "server", error, __name__) from error

LONGEST_OPTIONS = 100_000
"""Characters of a request's options as JSON: the scorers made with them are kept."""
UNOPENED = "/dev/null/an image of a client, which this server does not open"
"""The folder of images that clients name and nobody here shall open: no file can lie in it."""


@dataclass(frozen=True, slots=True)
class RewardServerSettings:
    """How a server is made: `RewardServerSettings(scorers=("gsm8k", "my_rewards:exact"))`.

    No config has these: whoever starts a server decides them.
    """

    scorers: tuple[str, ...] = tuple(sorted(builtin_scorers()))
    """All that it serves. A scorer is code: clients choose among these and name no other."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By scorer: what clients cannot send, such as {judge: {base_urls: [...]}}, and defaults for what they can."""
    client_options: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By scorer: the options that clients may send, instead of those that it declares. Built-in ones take no others."""
    images: Path | None = None
    """Where image files lie that clients may name; no other is opened, only images that a request itself holds."""
    body: int = 64 * 1024 * 1024
    """Bytes of one request."""
    body_seconds: float = 60.0
    """Within which all of it must have come."""
    calls: int = 256
    """In progress; more are asked to come again. Each ends with its client."""


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
    if config is not None and (config.options or config.scorers or config.weights):
        raise ConfigError("a reward server's scorers and options are in its RewardServerSettings; clients weigh parts")
    app = make_app(make_runner(config or ScoringConfig(run=ScoringRun.pool)), token, settings, host)
    await serve_app(app, host, port)


def make_app(
    runner: Runner, token: str | None = None, settings: RewardServerSettings | None = None, host: str = "127.0.0.1"
) -> FastAPI:
    """The server's app at this host; the runner is started and stopped with it."""
    settings = settings or RewardServerSettings()
    scorers = _Scorers(runner, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await runner.start()
            yield
        finally:
            await runner.stop()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    intake = Intake(settings.body, settings.body_seconds, settings.calls)
    app.add_middleware(Gate, host=host, token=token, intake=intake)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/scorers")
    async def served() -> Response:
        """What a client may ask for, so that it finds out before it has anything to score."""
        return JSONResponse({"scorers": {name: sorted(allowed) for name, allowed in scorers.allowed.items()}})

    @app.post("/compute_reward")
    async def compute_reward(request: Request) -> Response:
        body, trajectory = _read(await request.body(), settings.images)
        answer = await _answer(scorers, body, trajectory)
        content = json.dumps({"id": body.id, "session": body.session, **answer})
        return Response(content, media_type="application/json")

    return app


async def _answer(scorers: "_Scorers", body: RewardRequest, trajectory: Trajectory) -> WireResult:
    """What the scorer says; its exception is an answer too, which the client raises as its own."""
    try:
        scorer = scorers.get(body.scorer, body.options)
    except TurnwiseError as error:
        return {"error": error_to_json(error)}
    return await score_to_wire(scorer, trajectory)


class _Scorers:
    """The scorers that are served, made as clients ask for them; those asked for last are kept."""

    def __init__(self, runner: Runner, settings: RewardServerSettings) -> None:
        self.allowed = {name: declared_options(name) for name in settings.scorers}  # one that is not there is found now
        """Options that clients may send, by scorer."""
        for name, names in settings.client_options.items():
            extra = sorted(set(names) - self._declared(name))
            if name in builtin_scorers() and extra:
                raise ConfigError(
                    f"RewardServerSettings.client_options: {extra[0]!r} of {name} never comes from a client"
                )
            self.allowed[name] = frozenset(names)
        for name, options in settings.options.items():
            self._declared(name)
            ScorerSpec(name, dict(options)).make()  # a misspelt option too
        self._settings = settings
        self._runner = runner
        self._made = functools.lru_cache(KEPT_SCORERS)(self._make)

    def get(self, name: str, options: Mapping[str, Any]) -> Scorer:
        check_client_options(name, options, self._declared(name))
        return self._made(name, json.dumps(options, sort_keys=True))

    def _declared(self, name: str) -> frozenset[str]:
        if name not in self.allowed:
            raise ConfigError(f"this reward server does not serve it: {unknown('scorer', name, self.allowed)}")
        return self.allowed[name]

    def _make(self, name: str, options: str) -> Scorer:
        own = self._settings.options.get(name, {})
        return self._runner.scorer(ScorerSpec(name, {**own, **json.loads(options)}))


def _read(body: bytes, images: Path | None) -> tuple[RewardRequest, Trajectory]:
    """The request and its trajectory. json reads what a row may hold and strict JSON not: NaN, lone surrogates."""
    try:
        parsed = RewardRequest.model_validate(json.loads(body))
        if len(json.dumps(parsed.options, sort_keys=True)) > LONGEST_OPTIONS:  # or nested too deeply
            raise HTTPException(422, f"options: at most {LONGEST_OPTIONS} characters")
        _close_images(parsed.trajectory, images)
        return parsed, from_row(parsed.trajectory)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        raise HTTPException(422, f"{'.'.join(map(str, fault['loc']))[:80]}: {fault['msg'][:200]}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HTTPException(422, f"not a trajectory: {type(error).__name__}: {str(error)[:200]}") from error


def _close_images(row: dict[str, Any], folder: Path | None) -> None:
    """Scorers open the images of a trajectory; one that a client names by its path is not opened unless it may be."""
    row["images"] = [_image(source, folder) for source in row["images"]]
    for message in _messages(row):
        for part in message["parts"] or ():
            if part["kind"] == "image":
                part["value"] = _image(part["value"], folder)


def _messages(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from row["prompt"]
    yield from row["messages"]
    for turn in row["turns"]:
        yield turn["message"]
        yield from turn["replies"]


def _image(source: str, folder: Path | None) -> str:
    if source.startswith("data:"):
        return source
    if folder is not None:
        path = (folder / source).resolve()
        if path.is_relative_to(folder.resolve()) and path.is_file():
            return str(path)
    return f"{UNOPENED}/{Path(source).name}"

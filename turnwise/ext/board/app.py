"""The board's HTTP interface: routes, what a query may say, and one form for every error."""

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp

from turnwise.errors import StorageError
from turnwise.ext.board import static_files
from turnwise.ext.board.access import EVENTS, BoardAddress, BoardGate, content_policy
from turnwise.ext.board.events import stream
from turnwise.ext.board.replays import ReplayRequest, Replays
from turnwise.ext.board.runs import BoardRun, NotFound, Runs
from turnwise.storage.configs import diff
from turnwise.storage.json_text import to_json

MOST_RUNS = 32
MOST_SERIES = 400

Names = Annotated[str, Query(max_length=16_000)]
Split = Literal["train", "eval", "greedy", "reused", "probe", "all"]
Shard = Annotated[str, Query(max_length=200)]
Row = Annotated[int, Query(ge=0, le=10_000_000)]
Expression = Annotated[str, Query(max_length=2000)]


def make_app(
    runs: Runs, address: BoardAddress, closing: asyncio.Event | None = None, replays: Replays | None = None
) -> ASGIApp:
    """The app. `closing` ends the open streams, which a server that stops would otherwise wait for.

    With `replays` a page may have episodes played again; without, nothing can be done but look.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # numbers hardly shrink further at higher levels, which take four times as long
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=1)
    _add_errors(app)
    _add_shell(app)
    _add_runs(app, runs)
    _add_pairs(app, runs)
    _add_series(app, runs)
    _add_findings(app, runs)
    _add_lists(app, runs)
    _add_trajectories(app, runs)
    _add_replays(app, runs, replays)
    _add_image(app, runs)

    @app.get(EVENTS)
    async def events(request: Request, names: Annotated[str, Query(max_length=16_000, alias="runs")] = "") -> Response:
        wanted = _split(names, MOST_RUNS)
        for name in wanted:
            await run_in_threadpool(runs.open, name)
        text = stream(runs, wanted, closing or asyncio.Event(), reconnected="last-event-id" in request.headers)
        return StreamingResponse(text, media_type="text/event-stream")

    # around everything, the framework's own answer to a bug included, which it gives outside of its middleware
    return BoardGate(app, address, content_policy(static_files.inline_hashes()), writes=replays is not None)


def answer(value: Any, status: int = 200) -> Response:
    """A JSON response; what is not a finite number becomes null."""
    return Response(to_json(value), status, media_type="application/json")


def _split(text: str, most: int) -> list[str]:
    """The names in `a,b,c`, each once."""
    names = list(dict.fromkeys(name for name in text.split(",") if name))
    if len(names) > most:
        raise HTTPException(400, f"{len(names)} names are more than the {most} that are answered at once")
    return names


def _add_errors(app: FastAPI) -> None:
    """Every error is `{"error": text}`: asked wrongly, not there, damaged, or our fault."""

    @app.exception_handler(NotFound)
    def missing(_: Request, error: NotFound) -> Response:
        return answer({"error": str(error), "title": error.title}, 404)

    @app.exception_handler(StorageError)
    def damaged(_: Request, error: StorageError) -> Response:
        return answer({"error": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        """What is wrong and where, without the input, which may be long."""
        faults = [
            f"{'.'.join(str(part)[:80] for part in fault['loc'][1:])}: {fault['msg']}" for fault in error.errors()[:8]
        ]
        return answer({"error": "; ".join(faults)}, 400)

    @app.exception_handler(HTTPException)
    def refused(_: Request, error: HTTPException) -> Response:
        return answer({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(Exception)
    def broken(_: Request, error: Exception) -> Response:
        """A bug of the board: the page says so, the server writes the traceback to the terminal."""
        return answer({"error": f"the board failed: {type(error).__name__}; its terminal says where"}, 500)


def _add_shell(app: FastAPI) -> None:
    def send(asset: static_files.Asset, request: Request, cache: str) -> Response:
        headers = {"ETag": asset.tag, "Cache-Control": cache, "Vary": "Accept-Encoding"}
        if asset.gzipped:
            headers["Content-Encoding"] = "gzip"
        if request.headers.get("if-none-match") == asset.tag:
            return Response(None, 304, headers)
        return Response(asset.content, 200, headers, media_type=asset.media_type)

    @app.get("/")
    def index(request: Request) -> Response:
        return send(static_files.static_file("index.html"), request, "no-cache")

    @app.get("/static/{name:path}")
    def static(request: Request, name: str) -> Response:
        return send(static_files.static_file(name), request, "no-cache")

    @app.get("/plotly.js")
    def plotly(request: Request) -> Response:
        zipped = "gzip" in request.headers.get("accept-encoding", "")
        return send(static_files.plotly(zipped), request, "private, max-age=3600")


def _add_runs(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs")
    def listing() -> Response:
        return answer({"runs": runs.summaries(time.time())})

    @app.get("/api/runs/{run}")
    def details(run: str) -> Response:
        return answer(runs.open(run).details(time.time()))

    @app.get("/api/runs/{run}/config")
    def config(run: str) -> Response:
        opened = runs.open(run)
        opened.check()
        text, values = opened.config()
        return answer({"text": text, "values": values})

    @app.get("/api/diff")
    def differences(names: Annotated[str, Query(alias="runs", max_length=16_000)]) -> Response:
        wanted = [runs.open(name) for name in _split(names, MOST_RUNS)]
        for run in wanted:
            run.check()
        return answer({"keys": diff({run.name: run.config()[1] for run in wanted})})


def _add_pairs(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/pairs")
    def pairs(names: Annotated[str, Query(alias="runs", max_length=16_000)]) -> Response:
        """The newest evaluations of two runs, answer by answer."""
        from turnwise.ext.board.results import paired

        wanted = [runs.open(name) for name in _split(names, MOST_RUNS)]
        if len(wanted) != 2:
            raise HTTPException(400, f"pairs are of two runs, not of {len(wanted)}")
        for run in wanted:
            run.refresh()
        return answer(paired(wanted[0].table.snapshot, wanted[1].table.snapshot))


def _add_series(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs/{run}/series")
    def series(run: str, names: Names, points: Annotated[int, Query(ge=10, le=5000)] = 600) -> Response:
        """Names that the run does not have are left out: runs that are compared differ in them."""
        opened = runs.open(run)
        opened.check()
        opened.series.refresh()
        available = opened.series.names()
        wanted: dict[str, None] = {}
        for name in _split(names, MOST_SERIES):
            if name.endswith("*"):
                wanted |= dict.fromkeys(metric for metric in available if metric.startswith(name[:-1]))
            elif name in available:
                wanted[name] = None
        if len(wanted) > MOST_SERIES:
            raise HTTPException(400, f"these are {len(wanted)} metrics; at most {MOST_SERIES} are answered at once")
        series_by_name = {name: opened.series.thinned(name, points) for name in wanted}
        return answer({"series": series_by_name})


def _ask(runs: Runs, name: str, make: Callable[[BoardRun], Any]) -> Response:
    """What `make` says about a run that was read on just now: a value, or a response of its own."""
    from turnwise.ext.board.filters import BadFilter
    from turnwise.ext.board.table import NotThere

    run = runs.open(name)
    run.refresh()
    try:
        content = make(run)
    except BadFilter as error:
        span = {"message": error.message, "column": error.column, "end": error.end}
        return answer({"error": str(error), "filter": span}, 400)
    except NotThere as error:
        return answer({"error": str(error), "title": error.title}, 404)
    return content if isinstance(content, Response) else answer(content)


def _add_findings(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs/{run}/spread")
    def spread(run: str) -> Response:
        from turnwise.ext.board.reward_spread import spread as make

        return _ask(runs, run, lambda it: it.kept("spread", lambda: make(it.table)))

    @app.get("/api/runs/{run}/tools")
    def tools(run: str) -> Response:
        from turnwise.ext.board.tools import tools as make

        return _ask(runs, run, lambda it: it.kept("tools", lambda: make(it.table)))

    @app.get("/api/runs/{run}/health")
    def health(run: str) -> Response:
        return _ask(runs, run, lambda it: it.kept("health", it.health))

    @app.get("/api/runs/{run}/watch")
    def watch(run: str) -> Response:
        """How many findings there are, for a badge."""
        opened = runs.open(run)
        opened.check()
        return answer(opened.watched())


def _add_lists(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs/{run}/fields")
    def fields(run: str) -> Response:
        from turnwise.ext.board import presets

        runs.open(run)
        return answer(presets.fields())

    @app.get("/api/runs/{run}/trajectories")
    def trajectories(
        run: str,
        split: Split = "all",
        filter: Expression = "",
        search: Annotated[str, Query(max_length=500)] = "",
        sort: Annotated[str, Query(max_length=200)] = "",
        order: Literal["asc", "desc"] = "desc",
        offset: Annotated[int, Query(ge=0, le=100_000_000)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> Response:
        from turnwise.ext.board.table import listing

        wanted = {"split": split, "filter": filter, "search": search, "sort": sort, "order": order}
        return _ask(runs, run, lambda it: listing(it.table, **wanted, offset=offset, limit=limit))

    @app.get("/api/runs/{run}/trajectories.csv")
    def as_csv(
        run: str,
        split: Split = "all",
        filter: Expression = "",
        search: Annotated[str, Query(max_length=500)] = "",
        sort: Annotated[str, Query(max_length=200)] = "",
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        from turnwise.ext.board.export import TooMuch, csv_lines

        def make(it: BoardRun) -> Response:
            try:
                lines = csv_lines(it.table, split=split, filter=filter, search=search, sort=sort, order=order)
            except TooMuch as error:
                raise HTTPException(409, str(error)) from error
            name = quote(f"{it.name}-trajectories.csv")
            headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
            return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=headers)

        return _ask(runs, run, make)

    @app.get("/api/runs/{run}/search")
    def full_text(
        run: str,
        text: Annotated[str, Query(min_length=1, max_length=500)],
        filter: Expression = "",
        split: Split = "all",
        cursor: Annotated[str, Query(max_length=400)] = "",
    ) -> Response:
        from turnwise.ext.board.search import search

        def make(it: BoardRun) -> Any:
            return search(it.dir, it.table, text=text, filter=filter, split=split, cursor=cursor or None)

        return _ask(runs, run, make)


def _add_trajectories(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs/{run}/group")
    def group(run: str, shard: Shard, sample: Annotated[str, Query(max_length=4000)]) -> Response:
        from turnwise.ext.board.groups import group as make

        return _ask(runs, run, lambda it: make(it.dir, it.table, shard, sample))

    @app.get("/api/runs/{run}/sample")
    def sample(run: str, sample: Annotated[str, Query(max_length=4000)]) -> Response:
        from turnwise.ext.board.sample_history import sample_history

        return _ask(runs, run, lambda it: sample_history(it.table, sample))

    @app.get("/api/runs/{run}/trajectory")
    def trajectory(run: str, shard: Shard, row: Row) -> Response:
        from turnwise.ext.board.conversation import conversation

        return _ask(runs, run, lambda it: conversation(it.dir, it.table, shard, row))

    @app.get("/api/runs/{run}/probe")
    def probes(run: str) -> Response:
        from turnwise.ext.board.probes import probe

        return _ask(runs, run, lambda it: probe(it.dir, it.table))

    @app.get("/api/runs/{run}/tokens")
    def token_view(run: str, shard: Shard, row: Row) -> Response:
        from turnwise.ext.board.tokens import tokens

        return _ask(runs, run, lambda it: tokens(it.dir, it.table, shard, row))


def _add_replays(app: FastAPI, runs: Runs, replays: Replays | None) -> None:
    @app.get("/api/replay")
    def allowed() -> Response:
        return answer({"allowed": replays is not None})

    @app.post("/api/runs/{run}/replay")
    async def replay(run: str, request: ReplayRequest) -> Response:
        from turnwise.ext.board.json_values import plain

        if replays is None:  # the gate lets no POST through either
            raise HTTPException(405, "this board cannot replay episodes; start it with --replay")
        opened = await run_in_threadpool(runs.open, run)
        return answer(plain(await replays.start(opened.dir, request)))


def _add_image(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs/{run}/image")
    def image(run: str, name: Annotated[str, Query(max_length=200)]) -> Response:
        from turnwise.ext.board.images import image_bytes
        from turnwise.ext.board.table import NotThere

        try:
            content, kind = image_bytes(runs.open(run).dir, name)
        except NotThere as error:
            raise NotFound(str(error)) from error
        return Response(content, media_type=kind)

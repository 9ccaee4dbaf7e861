"""`search` over articles and `retrieve` over HTTP: what the model reads, and that every failure is said."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnwise.config import RolloutConfig
from turnwise.errors import ConfigError, DataError, PluginError
from turnwise.ext.research.corpus.articles import shipped
from turnwise.ext.research.corpus.retrieval_server import make_app
from turnwise.ext.research.tools.retrieve import RetrieveTool
from turnwise.ext.research.tools.search import CorpusSearchTool
from turnwise.rollout.toolbox.files import load_tools
from turnwise.rollout.toolbox.loading import load_tool
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.tool import Tool
from turnwise.types import CallRecord, CallStatus, Message, Role, Sample, ToolCall

SAMPLE = Sample("test:0", (Message(Role.USER, "Where?"),), "shop")


async def ask(tool: Tool, **arguments: Any) -> tuple[CallRecord, str]:
    toolbox = Toolbox([tool], RolloutConfig())
    async with toolbox.running(lambda line: None):
        episode = toolbox.open(SAMPLE, toolbox.common)
        records: list[CallRecord] = []
        (message,) = await episode.call([ToolCall("c", tool.name, arguments)], records)
        await episode.close()
        return records[0], message.text


def test_the_shipped_articles_are_found_with_their_ids():
    town = next(article for article in shipped().articles if article.kind == "town")
    record, text = asyncio.run(ask(load_tool("search"), query=f"{town.title} lies on river", k=2))
    assert text.startswith(f"1. [{town.id}] {town.title}: {town.text}\n2. [")
    assert record.info["ids"][0] == town.id
    assert len(record.info["ids"]) == 2


def test_bad_queries_are_answered():
    record, text = asyncio.run(ask(load_tool("search"), query="qqqq"))
    assert (record.status, text) == (CallStatus.OK, "No article holds any of these words.")
    for wrong in ({"query": "x", "k": 0}, {"query": "x", "k": 11}, {"query": "x" * 1001}, {"k": 1}):
        assert asyncio.run(ask(load_tool("search"), **wrong))[0].status is CallStatus.BAD_ARGUMENTS


def test_a_users_own_files_are_searched_and_long_passages_are_cut(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text(json.dumps({"id": "a", "title": "Tea", "text": "hot " * 100}) + "\n")
    _, text = asyncio.run(ask(CorpusSearchTool(files=(str(path),), passage_chars=20), query="tea"))
    assert text == "1. [a] Tea: hot hot hot hot hot  ..."
    with pytest.raises(DataError, match="cannot be read"):
        asyncio.run(ask(CorpusSearchTool(files=("nowhere.jsonl",)), query="tea"))


def test_an_entry_of_a_tools_file_configures_them(tmp_path):
    (tmp_path / "docs.jsonl").write_text('{"id": "a", "title": "Tea", "text": "hot"}\n')
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - {name: search, config: {files: [docs.jsonl], k: 1}}\n"
        "  - {name: retrieve, config: {retrieval_service_url: 'http://127.0.0.1:9/r', topk: 7}, timeout: 5}\n"
    )
    search, retrieve = load_tools(str(tmp_path / "tools.yaml"))
    assert asyncio.run(ask(search, query="tea"))[1] == "1. [a] Tea: hot"
    assert (retrieve.timeout, retrieve.tool.topk) == (5, 7)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("{name: search, config: {file: [a]}}", "did you mean 'files'"),
        ("{name: search, config: {k: 0}}", "k: "),
        ("{name: retrieve, config: {topk: 3}}", "retrieval_service_url"),
        ("{name: retrieve, config: {retrieval_service_url: 'ftp://x'}}", "begins with"),
        ("{name: calculate, config: {k: 0}}", "calculate takes no config"),
    ],
)
def test_a_wrong_config_is_one_clear_line(tmp_path, entry, problem):
    (tmp_path / "tools.yaml").write_text(f"tools:\n  - {entry}\n")
    with pytest.raises(ConfigError, match=problem):
        load_tools(str(tmp_path / "tools.yaml"))


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """The address of an app on a free port."""
    import uvicorn

    from turnwise.system.addresses import bind

    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/retrieve"
    finally:
        server.should_exit = True
        await task


def answering(answers: list[Response]) -> tuple[Any, list[Any]]:
    """A service that gives these answers in turn, and what it was asked."""
    asked: list[Any] = []

    async def retrieve(request: Any) -> Response:
        asked.append(await request.json())
        return answers[min(len(asked), len(answers)) - 1]

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])]), asked


def playing(app: Any, play: Callable[[str], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with served(app) as url:
            return await play(url)

    return asyncio.run(main())


def test_a_service_over_the_same_index_speaks_verls_contract():
    title = shipped().articles[0].title
    play = lambda url: ask(RetrieveTool(url=url, topk=2), query_list=[title, "glass hall"])  # noqa: E731
    record, text = playing(make_app(shipped()), play)
    first, second = json.loads(text)["result"].split("\n---\n")
    assert first.startswith(f"Doc 1 (Title: {title})\n")
    assert "\n\nDoc 2 (Title: " in second
    assert len(record.info["ids"]) == 4


def test_a_service_that_is_busy_is_asked_again_and_bare_documents_are_read():
    good = JSONResponse({"result": [[{"contents": "Tea\nhot"}]]})
    app, asked = answering([Response(status_code=503), Response(status_code=429, headers={"retry-after": "0"}), good])
    play = lambda url: ask(RetrieveTool(url=url, first_wait=0.01), query_list=["tea"])  # noqa: E731
    _, text = playing(app, play)
    assert json.loads(text) == {"result": "Doc 1 (Title: Tea)\nhot"}
    assert asked == [{"queries": ["tea"], "topk": 3, "return_scores": True}] * 3


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Response(status_code=500), "failed 2 times: it answered 500"),
        (Response(status_code=404), "answered 404"),
        (Response("nonsense"), "not JSON"),
        (JSONResponse({"result": []}), "with 1 lists"),
        (JSONResponse({"result": [[{"document": {}}]]}), "without"),
        (Response("x" * 8_000_001), "more than 8000000 bytes"),
    ],
)
def test_every_failure_of_a_service_is_an_error_that_the_model_reads(answer, problem):
    app, _ = answering([answer])
    play = lambda url: ask(RetrieveTool(url=url, retries=1, first_wait=0.01), query_list=["tea"])  # noqa: E731
    record, text = playing(app, play)
    assert record.status is CallStatus.ERROR
    assert problem in text


def test_a_service_that_is_not_there_and_addresses_that_are_none(monkeypatch):
    gone = RetrieveTool(url="http://127.0.0.1:9/retrieve", retries=1, first_wait=0.01)
    record, text = asyncio.run(ask(gone, query_list=["tea"]))
    assert (record.status, "failed 2 times" in text) == (CallStatus.ERROR, True)
    for url, problem in (("file:///etc/passwd", "begins with"), ("http://me:secret@host/", "no password")):
        with pytest.raises(ConfigError, match=problem) as caught:
            RetrieveTool(url=url)
        assert "secret" not in str(caught.value)
    monkeypatch.delenv("TURNWISE_RETRIEVAL_URL", raising=False)
    with pytest.raises(PluginError, match="TURNWISE_RETRIEVAL_URL"):
        asyncio.run(ask(load_tool("retrieve"), query_list=["tea"]))


@pytest.mark.parametrize(
    "asked", [{"queries": []}, {"queries": ["x"] * 65}, {"queries": ["x"], "topk": 0}, {"queries": "x"}]
)
def test_the_service_refuses_what_is_no_question(asked):
    import httpx

    async def play(url: str) -> int:
        async with httpx.AsyncClient() as client:
            return (await client.post(url, json=asked)).status_code

    assert playing(make_app(shipped()), play) == 422

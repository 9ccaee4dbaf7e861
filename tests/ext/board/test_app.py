"""The board over real HTTP, with real runs behind it."""

import asyncio
import base64
import concurrent.futures
import contextlib
import gzip
import hashlib
import json
import re
import threading

import httpx
import pytest
import uvicorn

from turnwise.ext.board import static_files
from turnwise.ext.board.access import BoardAddress
from turnwise.ext.board.app import answer, make_app
from turnwise.ext.board.runs import Runs
from turnwise.storage.index import record
from turnwise.storage.run_dir import RunDir
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Ledger,
    Message,
    Origin,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
TRAIN = "trajectories/step_000001"


@contextlib.contextmanager
def serving(places, token=None, kind=Runs):
    """A server in a thread, and a client."""
    started = concurrent.futures.Future()

    async def main():
        closing = asyncio.Event()
        app = make_app(kind(places), BoardAddress("127.0.0.1", 7007, token), closing)
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        running = asyncio.ensure_future(server.serve())
        while not server.started:
            assert not running.done()
            await asyncio.sleep(0.01)
        started.set_result((server, server.servers[0].sockets[0].getsockname()[1]))
        await running

    def work():
        try:
            asyncio.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    server, port = started.result(60)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def a_trajectory(number, reward, step=1):
    question, answered = (
        Message(Role.USER, f"What is {number} times 7?"),
        f"It is {7 * number} <script>alert(1)</script>",
    )
    call = ToolCall("call_0", "calculate", {"expression": f"{number}*7"})
    said = Message(Role.ASSISTANT, "let me see", tool_calls=(call,))
    reply = Message(Role.TOOL, str(7 * number), tool_call_id="call_0", name="calculate")
    last = Message(Role.ASSISTANT, answered, answer=answered)
    ledger = Ledger()
    ledger.append([1, 2, 3], Origin.PROMPT, 0)
    ledger.append([4, 5], Origin.POLICY, 0, [-0.5, -0.25], 0)
    ledger.append([6], Origin.TOOL, 0)
    ledger.append([7, 8], Origin.POLICY, 1, [-0.125, -0.75], 0)
    turns = [
        Turn(0, said, FinishReason.STOP, 0, 3, 2, 0, 3, [CallRecord(call, CallStatus.OK, 0.01)], [reply]),
        Turn(1, last, FinishReason.STOP, 0, 6, 2, 0, 6),
    ]
    sample = Sample(f"sample:{number // 2}", (question,), "arithmetic", ground_truth=str(7 * number))
    messages = [question, said, reply, last]
    parts = {"acc": reward, "format": 1.0}
    return Trajectory(
        sample, number % 2, step, messages, turns, [ledger], StopReason.ANSWERED, 1.5, reward=reward, parts=parts
    )


def a_run(folder, name, **config):
    run = RunDir.create(folder, name, "train")
    values = {"seed": 0, "steps": 2} | config
    run.write_text("config.yaml", f"task: arithmetic\nseed: {values['seed']}\ntraining:\n  steps: {values['steps']}\n")
    run.write_text("plan.txt", "the plan\n")
    run.log("it began")
    for step in range(1, 21):
        values = {"step": step, "seconds": 2.0 * step, "tokens": 10 * step, "critic/score/mean": step / 20, "loss": 1.0}
        run.append_jsonl("metrics.jsonl", values)
    run.append_jsonl(
        "metrics.jsonl", {"step": 20, "seconds": 41.0, "val/accuracy": 0.5, "val/accuracy/arithmetic": 0.5}
    )
    return run


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """Two runs, one with trajectories and pictures."""
    place = tmp_path_factory.mktemp("board") / "runs"
    first = a_run(place, "first")
    record(first, f"{TRAIN}.parquet", [a_trajectory(number, float(number % 2)) for number in range(4)])
    record(first, "eval/step_000002.parquet", [a_trajectory(number, 1.0, 2) for number in range(2)])
    (first.path / "images").mkdir(exist_ok=True)
    (first.path / "images" / "abcd0123abcd.png").write_bytes(PNG)
    (first.path / "images" / "0badc0de0001.png").write_bytes(b"<html><script>alert(1)</script>")
    (first.path / "images" / "0badc0de0002.webp").write_bytes(b"RIFF\0\0\0\0WEBPVP8 ")
    (first.path / "images" / "0badc0de0003.webp").write_bytes(b"RIFF\0\0\0\0WAVEfmt ")
    (place.parent / "secret.png").write_bytes(PNG)
    (first.path / "images" / "0badc0de0005.png").symlink_to(place.parent / "secret.png")
    a_run(place, "second", seed=1)
    with serving([place]) as client:
        yield client


def found(board, path, status=200, **params):
    response = board.get(path, params=params)
    assert response.status_code == status, response.text
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    return response.json()


def test_what_is_not_there_is_named_with_the_nearest(board):
    missing = found(board, "/api/runs/frist", 404)
    assert missing == {"error": "there is no run 'frist' here; did you mean 'first'?", "title": "No such run"}
    assert found(board, "/api/pairs", 404, runs="first,third")["title"] == "No such run"
    assert "two runs" in found(board, "/api/pairs", 400, runs="first")["error"]
    assert found(board, "/api/pairs", runs="first,second") == {"sources": [], "flips": [], "alone": [2, 0]}


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_page_and_its_files_are_served_under_a_policy_that_knows_its_import_map(board):
    page = board.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    inline = re.search(r'<script type="importmap">(.*?)</script>', page.text)[1]
    digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    assert f"script-src 'self' 'sha256-{digest}'" in page.headers["content-security-policy"]
    assert json.loads(inline) == {"imports": {"board/": "/static/js/"}}
    paths = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text)
    assert {path.rpartition(".")[2] for path in paths} == {"js", "css"}
    for path in paths:
        file = board.get(path)
        assert file.status_code == 200 and file.headers["x-content-type-options"] == "nosniff"
        assert file.headers["content-type"].split(";")[0] in ("text/javascript", "text/css")
        assert board.get(path, headers={"If-None-Match": file.headers["etag"]}).status_code == 304


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/js/%2e%2e/%2e%2e/gate.py", "/static/", "/static/js",
             "/static//etc/passwd", "/static/js/main.js%00.css", "/static/.hidden.js", "/app.py", "/api/secret"]
)  # fmt: skip
def test_nothing_else_is_a_file_of_the_page(board, path):
    response = board.get(path)
    assert response.status_code == 404 and response.json()["error"]


def test_plotly_is_the_installed_one_and_zipped(board):
    with board.stream("GET", "/plotly.js") as response:
        raw = b"".join(response.iter_raw())
    installed = static_files.plotly_path().read_bytes()
    assert response.headers["content-encoding"] == "gzip" and len(raw) < len(installed) / 2
    assert gzip.decompress(raw) == installed
    plain = board.get("/plotly.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.content == installed


def test_long_answers_are_zipped_and_short_ones_not(board):
    assert board.get("/api/runs/first/fields").headers.get("content-encoding") == "gzip"
    assert "content-encoding" not in board.get("/api/diff", params={"runs": "first"}).headers


def test_head_has_the_headers_and_no_body(board):
    response = board.head("/api/runs")
    assert response.status_code == 200 and response.content == b"" and int(response.headers["content-length"]) > 0
    assert board.head("/api/events").status_code == 405


# --- runs -----------------------------------------------------------------------------------------------------------


def test_the_list_of_runs(board):
    runs = found(board, "/api/runs")["runs"]
    assert sorted(run["name"] for run in runs) == ["first", "second"]
    assert all(len(run["spark"]) == 20 and run["reward"] == 1.0 and run["accuracy"] == 0.5 for run in runs)
    assert {"state", "reason", "command", "step", "steps", "seconds", "started", "updated", "task", "model"} <= set(
        runs[0]
    )


def test_one_run(board):
    run = found(board, "/api/runs/first")
    assert run["plan"] == "the plan\n" and "it began" in run["log"]
    assert run["metrics"] == ["critic/score/mean", "loss", "val/accuracy", "val/accuracy/arithmetic"]
    assert run["sources"] == ["arithmetic"] and run["trajectories"] == 6 and not run["has_tokenizer"]
    shards = {(shard["shard"], shard["split"], shard["step"], shard["size"]) for shard in run["shards"]}
    assert shards == {(TRAIN, "train", 1, 4), ("eval/step_000002", "eval", 2, 2)}
    assert run["problems"] == [] and run["pending"] == 0 and isinstance(run["version"], int)


def test_config_and_what_differs(board):
    config = found(board, "/api/runs/second/config")
    assert config["values"]["seed"] == "1" and "seed: 1" in config["text"]
    assert found(board, "/api/diff", runs="first,second")["keys"] == [
        {"key": "seed", "values": {"first": "0", "second": "1"}}
    ]


def test_series_by_name_and_by_prefix_thinned(board):
    series = found(board, "/api/runs/first/series", names="loss,val/*,unknown", points=10)["series"]
    assert set(series) == {"loss", "val/accuracy", "val/accuracy/arithmetic"}
    assert len(series["loss"]["value"]) == 10 and series["loss"]["low"] == [1.0] * 10
    assert series["val/accuracy"] == {"step": [20], "seconds": [41.0], "tokens": [None], "value": [0.5]}


@pytest.mark.parametrize("path", ["/api/runs/third", "/api/runs/..", "/api/runs/%2e%2e%2ffirst", "/api/runs/third/series?names=a",
                                  "/api/diff?runs=first,third", "/api/events?runs=third"])  # fmt: skip
def test_a_run_that_is_not_there(board, path):
    response = board.get(path)
    assert response.status_code == 404 and response.json()["error"]


@pytest.mark.parametrize("path", [
    "/api/runs/first/series", "/api/runs/first/series?names=a&points=9", "/api/runs/first/series?names=a&points=5001",
    "/api/runs/first/series?names=" + "a" * 17_000, "/api/diff", "/api/diff?runs=" + ",".join(map(str, range(40))),
    "/api/runs/first/trajectories?limit=501", "/api/runs/first/trajectories?offset=-1", "/api/runs/first/trajectories?split=test",
    "/api/runs/first/trajectories?order=up", "/api/runs/first/trajectories?sort=nothing",
    "/api/runs/first/trajectories?filter=reward%20%3E", "/api/runs/first/trajectories?filter=" + "(" * 2001,
    "/api/runs/first/trajectory?shard=x", "/api/runs/first/trajectory?shard=x&row=-1", "/api/runs/first/trajectory?shard=x&row=1.5",
    "/api/runs/first/search?text=", "/api/runs/first/image", "/api/runs/first/image?name=" + "a" * 300,
])  # fmt: skip
def test_a_query_that_makes_no_sense_is_refused_with_a_word(board, path):
    response = board.get(path)
    assert response.status_code == 400 and len(response.json()["error"]) > 5


# --- trajectories ---------------------------------------------------------------------------------------------------


def test_the_list_of_trajectories(board):
    page = found(board, "/api/runs/first/trajectories", split="train", filter="reward > 0.5", sort="reward", limit=1)
    assert (page["total"], page["matched"], page["offset"], len(page["rows"])) == (4, 2, 0, 1)
    assert page["rows"][0]["shard"] == TRAIN and page["rows"][0]["reward"] == 1.0
    assert found(board, "/api/runs/first/trajectories", search="2 times")["matched"] == 1
    wrong = found(board, "/api/runs/first/trajectories", 400, filter="right and rewrd > 1")["filter"]
    assert (wrong["column"], wrong["end"]) == (11, 16) and "did you mean 'reward'" in wrong["message"]
    table = board.get("/api/runs/first/trajectories.csv", params={"split": "train", "filter": "reward > 0.5"})
    assert table.headers["content-type"].startswith("text/csv") and "first-traj" in table.headers["content-disposition"]
    assert len(table.text.splitlines()) == 3 and table.text.startswith("shard,row,split,sample_id,")
    assert found(board, "/api/runs/first/trajectories.csv", 400, filter="rewrd")["filter"]["column"] == 1
    fields = found(board, "/api/runs/first/fields")
    assert {"reward", "stop_reason"} <= {field["name"] for field in fields["fields"]} and fields["presets"]


def test_one_trajectory_its_group_its_tokens_and_the_search(board):
    one = found(board, "/api/runs/first/trajectory", shard=TRAIN, row=1)
    assert one["row"] == 1 and one["reward"] == 1.0 and len(one["turns"]) == 2
    group = found(board, "/api/runs/first/group", shard=TRAIN, sample="sample:0")
    assert len(group["siblings"]) == 2
    assert found(board, "/api/runs/first/sample", sample="sample:0")["groups"][-1]["shard"] == TRAIN
    assert found(board, "/api/runs/first/group", 404, shard=TRAIN, sample="x")["title"] == "No such group"
    tokens = found(board, "/api/runs/first/tokens", shard=TRAIN, row=1)
    assert tokens["segments"][0]["ids"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert one["probes"] == {} and one["targets"] == [] and one["sources"] == []
    assert found(board, "/api/runs/first/probe", 404)["title"] == "No such probe"
    assert not found(board, "/api/runs/first")["probe"]
    hits = found(board, "/api/runs/first/search", text="It is 21")["hits"]
    assert [(hit["shard"], hit["row"]) for hit in hits] == [(TRAIN, 3)]


@pytest.mark.parametrize("query", [{"shard": "trajectories/step_000009", "row": 0}, {"shard": TRAIN, "row": 4},
                                   {"shard": "../first/trajectories/step_000001", "row": 0}, {"shard": "config", "row": 0}])  # fmt: skip
@pytest.mark.parametrize("view", ["trajectory", "tokens"])
def test_a_trajectory_that_is_not_there(board, view, query):
    said = found(board, f"/api/runs/first/{view}", 404, **query)
    assert said["error"] and said["title"] == "No such trajectory"


def test_findings_are_answered_for_runs_with_and_without_trajectories(board):
    for run in ("first", "second"):
        assert "series" in found(board, f"/api/runs/{run}/spread")
        assert "funnel" in found(board, f"/api/runs/{run}/tools")
        assert isinstance(found(board, f"/api/runs/{run}/health")["findings"], list)


# --- pictures -------------------------------------------------------------------------------------------------------


def test_pictures_by_their_content(board):
    picture = board.get("/api/runs/first/image", params={"name": "images/abcd0123abcd.png"})
    assert picture.content == PNG and picture.headers["content-type"] == "image/png"
    assert (
        board.get("/api/runs/first/image", params={"name": "images/0badc0de0002.webp"}).headers["content-type"]
        == "image/webp"
    )


@pytest.mark.parametrize("name", ["0badc0de0001.png", "0badc0de0003.webp", "0badc0de0004.png", "0badc0de0005.png"])
def test_what_is_no_picture_of_the_run_is_not_sent(board, name):
    assert found(board, "/api/runs/first/image", 404, name=f"images/{name}")["error"]


@pytest.mark.parametrize(
    "name", ["images/../config.yaml", "config.yaml", "images/x.svg", "/etc/passwd", "images/a\n.png", ""]
)
def test_a_name_that_is_none_finds_nothing(board, name):
    assert found(board, "/api/runs/first/image", 404, name=name)["error"]


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_told_and_breaks_nothing_else(tmp_path):
    run = a_run(tmp_path, "torn")
    record(run, f"{TRAIN}.parquet", [a_trajectory(0, 1.0)])
    path = run.path / f"{TRAIN}.parquet"
    with serving([tmp_path]) as client:
        path.write_bytes(path.read_bytes()[:-50])
        assert found(client, "/api/runs/torn/trajectories")["matched"] == 1
        torn = found(client, "/api/runs/torn/trajectory", 422, shard=TRAIN, row=0)
        assert "step_000001.parquet" in torn["error"]
        (run.path / "config.yaml").write_text("task: [")
        assert "config.yaml" in found(client, "/api/runs/torn/config", 422)["error"]
        assert "config.yaml" in found(client, "/api/runs")["runs"][0]["reason"]
        assert found(client, "/api/runs/torn/series", names="loss")["series"]["loss"]["value"] == [1.0] * 20


def test_what_no_json_number_can_be_is_null():
    nested = {"a": [float("nan"), 1.5, {"b": float("-inf")}], "c": (float("inf"), "x", None, True)}
    assert json.loads(answer(nested).body) == {"a": [None, 1.5, {"b": None}], "c": [None, "x", None, True]}


def test_the_stream_tells_of_a_step(tmp_path):
    run = a_run(tmp_path, "live")
    with serving([tmp_path]) as client:
        headers = {"Last-Event-ID": "1"}  # somebody who comes back is told everything first
        with client.stream("GET", "/api/events", params={"runs": "live"}, headers=headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert "content-encoding" not in response.headers
            versions = []
            for line in response.iter_lines():
                if line.startswith("data: ") and "version" in line:
                    versions.append(json.loads(line.removeprefix("data: "))["version"])
                    if len(versions) == 1:
                        run.append_jsonl("metrics.jsonl", {"step": 21, "seconds": 50.0, "loss": 0.5})
                    else:
                        break
        assert versions[1] > versions[0]
        assert found(client, "/api/runs/live/series", names="loss")["series"]["loss"]["step"][-1] == 21


def test_a_token_is_needed_for_every_path(tmp_path):
    a_run(tmp_path, "first")
    with serving([tmp_path], token="s3cret") as client:
        assert client.get("/api/runs").status_code == 401 and client.get("/").status_code == 401
        assert client.get("/", params={"token": "s3cret"}, follow_redirects=True).status_code == 200
        assert client.get("/api/runs").status_code == 200  # the client kept the cookie


def test_many_at_once_see_the_same(board):
    paths = ["/api/runs", "/api/runs/first", "/api/runs/first/tools", "/api/runs/first/trajectories"] * 4
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda path: board.get(path).status_code, paths))
    assert answers == [200] * len(paths)


class Broken(Runs):
    def summaries(self, now):
        raise ZeroDivisionError("a bug")


def test_a_bug_is_an_answer_with_the_headers(tmp_path):
    with serving([tmp_path], kind=Broken) as client:
        assert "ZeroDivisionError" in found(client, "/api/runs", 500)["error"]


def test_the_version_stays_while_nothing_happens(board):
    """Else a page would load for ever."""
    assert len({found(board, "/api/runs/second")["version"] for _ in range(3)}) == 1

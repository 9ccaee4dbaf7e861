"""Episodes played again from the board: only where that was allowed, and as `turnwise replay` does it."""

import asyncio

import httpx
import pytest

from turnwise.commands import cli
from turnwise.ext.board.access import BoardAddress
from turnwise.ext.board.app import make_app
from turnwise.ext.board.replays import Replays
from turnwise.ext.board.runs import Runs

PATH, SHARD = "/api/runs/first/replay", "eval/step_000000"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    assert cli.main(["eval", "eval.samples=1", "engine.threads=1", "run=first", f"runs_dir={folder}"]) == 0
    return folder


def ask(runs, replays, method, path, json=None, **options):
    async def main():
        app = make_app(Runs([runs]), BoardAddress("127.0.0.1", 7007), None, replays)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7007", timeout=None) as client:
            return await client.request(method, path, json=json, **options)

    return asyncio.run(main())


def test_a_board_that_was_not_told_to_plays_nothing(runs):
    assert ask(runs, None, "GET", "/api/replay").json() == {"allowed": False}
    assert ask(runs, None, "POST", PATH, {"shard": SHARD, "row": 0}).status_code == 405
    assert [path.name for path in runs.iterdir()] == ["first"]


def test_an_episode_is_played_again_and_its_page_says_how_it_differs(runs):
    assert ask(runs, Replays(), "GET", "/api/replay").json() == {"allowed": True}
    edit = {"edit": "turn=0", "text": "--trust-run"}  # a text that looks like an option stays a text
    made = ask(runs, Replays(), "POST", PATH, {"shard": SHARD, "row": 0, **edit}).json()
    page = ask(runs, None, "GET", f"/api/runs/{made['run']}/trajectory?shard={SHARD}&row=0").json()
    assert "error" not in page, page
    assert page["replay"]["of_run"] == "first" and page["replay"]["edit"]["text"] == "--trust-run"
    assert page["replay"]["differences"] == made["differences"] and made["differences"]["parted"]
    before = ask(runs, None, "GET", f"/api/runs/first/trajectory?shard={SHARD}&row=0").json()
    assert before["replay"] is None


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"shard": SHARD, "row": 0, "edit": "turn=0 --trust-run", "text": "x"}, 400),
        ({"shard": SHARD, "row": 0, "model": "elsewhere"}, 400),
        ({"shard": SHARD, "row": "0"}, 400),
        ({"shard": "../../x", "row": 0}, 422),
    ],
)
def test_what_a_page_may_not_ask_is_refused(runs, asked, status):
    assert ask(runs, Replays(), "POST", PATH, asked).status_code == status


def test_a_page_elsewhere_cannot_ask(runs):
    plain = {"content": '{"shard": "x", "row": 0}', "headers": {"Content-Type": "text/plain"}}
    assert ask(runs, Replays(), "POST", PATH, **plain).status_code == 415

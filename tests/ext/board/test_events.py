"""The stream tells what changed, and only that."""

import asyncio
import contextlib
import json

from turnwise.ext.board.events import GONE, changed, poll_runs, stream
from turnwise.ext.board.runs import Runs
from turnwise.storage.run_dir import RunDir


def a_run(folder, name):
    run = RunDir.create(folder, name, "train")
    run.write_text("config.yaml", "task: arithmetic\n")
    return run


def parse(text):
    fields = dict(line.split(": ", 1) for line in text.strip().split("\n"))
    return fields["event"], json.loads(fields["data"])


async def told(runs, names, count, then=None, more=0, **options):
    """The first events; then `then` is called, and more are waited for."""
    closing, found = asyncio.Event(), []
    async with contextlib.aclosing(stream(runs, names, closing, poll_seconds=0.01, **options)) as events:
        assert (await anext(events)).startswith("retry: ")
        for _ in range(count):
            found.append(parse(await asyncio.wait_for(anext(events), 30)))
        if then is not None:
            then()
        for _ in range(more):
            found.append(parse(await asyncio.wait_for(anext(events), 30)))
    return found


def test_a_run_that_grows_is_told_with_its_new_version(tmp_path):
    first, _ = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    runs = Runs([tmp_path])
    before = poll_runs(runs, [])

    def grow():
        first.append_jsonl("metrics.jsonl", {"step": 1, "seconds": 1.0})

    found = asyncio.run(told(runs, ["first", "second"], 2, grow, 1, reconnected=True, ping_seconds=60))
    kind, news = found[-1]
    assert kind == "change" and news["run"] == "first" and news["state"] == "unknown"
    assert news["version"] == poll_runs(runs, [])["first"]["version"] != before["first"]["version"]


def test_nothing_new_is_a_ping_now_and_then(tmp_path):
    a_run(tmp_path, "first")
    assert asyncio.run(told(Runs([tmp_path]), ["first"], 2, ping_seconds=0.05)) == [("ping", {}), ("ping", {})]


def test_somebody_who_comes_back_is_told_everything(tmp_path):
    a_run(tmp_path, "first"), a_run(tmp_path, "second")
    found = asyncio.run(told(Runs([tmp_path]), [], 2, reconnected=True, ping_seconds=60))
    assert sorted(news["run"] for _, news in found) == ["first", "second"]


def test_new_and_removed_runs_are_told_to_those_who_follow_all(tmp_path):
    run = a_run(tmp_path / "runs", "first")
    runs = Runs([tmp_path / "runs"])
    before = poll_runs(runs, [])
    a_run(tmp_path / "runs", "second")
    run.path.rename(tmp_path / "away")
    news = {one["run"]: one["state"] for one in changed(before, poll_runs(runs, []))}
    assert news == {"first": GONE, "second": "unknown"}
    assert poll_runs(runs, ["first"])["first"]["state"] == GONE


def test_the_stream_ends_when_the_server_does(tmp_path):
    a_run(tmp_path, "first")

    async def main():
        closing = asyncio.Event()
        closing.set()
        return [text async for text in stream(Runs([tmp_path]), [], closing)]

    assert len(asyncio.run(main())) == 1

"""Verdicts: asked again, voted on, kept on disk, joined, measured."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from judge_servers import DROP, GARBAGE, GOOD, answer, says, settings, unreliable

from turnwise.errors import ScoringFailed, StorageError
from turnwise.ext.judge.judge import FILE, LlmJudge, ReplyCache, cache_key
from turnwise.ext.judge.prompts import equivalence, evidence_only
from turnwise.ext.judge.verdict import Verdict
from turnwise.scoring.event_loop_resources import close_loop_resources, take_metrics

RIGHT, WRONG = equivalence("6*7?", "42", "42"), equivalence("6*7?", "42", "41")


async def decide(options: Any, *inquiries: Any) -> tuple[list[Verdict], LlmJudge]:
    judge = LlmJudge(options)
    try:
        return list(await asyncio.gather(*(judge.decide(one) for one in inquiries))), judge
    finally:
        await judge.close()


def test_the_request_is_short_cool_and_seeded() -> None:
    async def main() -> None:
        async with unreliable() as server:
            extra = {"chat_template_kwargs": {"enable_thinking": False}}
            await decide(settings(server.url, seed=7, extra_body=extra), RIGHT)
            (sent,) = server.requests
            assert (sent["temperature"], sent["seed"], sent["max_tokens"]) == (0.0, 7, 16)
            assert sent["chat_template_kwargs"] == {"enable_thinking": False}

    asyncio.run(main())


@pytest.mark.parametrize("reply", ["I think it is 1", "0.7", "", "TRUE FALSE", None])
def test_a_reply_that_is_no_verdict_is_asked_again_with_the_reason(reply: str | None) -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: says(reply) if number == 0 else GOOD) as server:
            (verdict,), judge = await decide(settings(server.url), WRONG)
            assert verdict.value == 0.0 and judge.stats.unreadable_replies == 1
            first, second = server.requests
            assert second["messages"][:2] == first["messages"]
            assert "none of the allowed replies" in second["messages"][-1]["content"]

    asyncio.run(main())


def test_prose_to_the_end_is_a_failure_and_no_zero() -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: says("It depends.") if number >= 0 else GOOD) as server:
            judge = LlmJudge(settings(server.url, asks=2))
            with pytest.raises(ScoringFailed, match=r"none of TRUE, FALSE: 'It depends.' \(asked 2 times\)"):
                await judge.decide(RIGHT)
            await judge.close()
            assert len(server.requests) == 2 and judge.stats.failed_verdicts == 1

    asyncio.run(main())


def test_a_reply_that_was_cut_off_is_no_verdict() -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: says("0", "length") if number >= 0 else GOOD) as server:
            judge = LlmJudge(settings(server.url, asks=1))
            with pytest.raises(ScoringFailed, match="cut off after max_tokens=16"):
                await judge.decide(RIGHT)
            await judge.close()

    asyncio.run(main())


def test_the_majority_of_votes_counts_and_agreement_is_measured() -> None:
    async def main() -> None:
        def plan(number: int, request: Any) -> Any:
            return GOOD if number < 0 else says({10: "TRUE", 11: "FALSE", 12: "TRUE"}[request["seed"]])

        async with unreliable(plan) as server:
            (verdict,), judge = await decide(settings(server.url, votes=3, seed=10), WRONG)
            assert verdict == Verdict(1.0, (1.0, 0.0, 1.0), ("TRUE", "FALSE", "TRUE"))
            assert judge.stats.agreements == [pytest.approx(2 / 3)]

    asyncio.run(main())


def test_siblings_that_say_the_same_are_one_request() -> None:
    async def main() -> None:
        async with unreliable() as server:
            server.gate = asyncio.Event()
            judge = LlmJudge(settings(server.url, model="rule-judge"))
            work = [asyncio.ensure_future(judge.decide(WRONG)) for _ in range(8)]
            while not server.requests:
                await asyncio.sleep(0.005)
            work[0].cancel()  # the first to ask goes away; the others still get the answer
            await asyncio.sleep(0)
            server.gate.set()
            found = await asyncio.gather(*work, return_exceptions=True)
            await judge.close()
            assert isinstance(found[0], asyncio.CancelledError)
            assert [one.value for one in found[1:] if isinstance(one, Verdict)] == [0.0] * 7
            assert len(server.requests) == 1 and judge.stats.joined == 7

    asyncio.run(main())


def test_a_kept_verdict_needs_no_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with unreliable() as server:
            options = settings(server.url, model="rule-judge", votes=3, cache=str(tmp_path / "kept"))
            (first,), _ = await decide(options, RIGHT)
            assert len(server.requests) == 3
        (again,), judge = await decide(options, RIGHT)  # the server is gone
        assert again == first and judge.stats.requests == 0 and judge.stats.cache_hits == 3
        with pytest.raises(ScoringFailed):
            await decide(settings(server.url, model="rule-judge", cache=options.cache, seed=9, retries=0), RIGHT)

    asyncio.run(main())


def test_only_verdicts_are_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: says("hm") if 0 <= number < 2 else GOOD) as server:
            options = settings(server.url, model="rule-judge", asks=2, cache=str(tmp_path))
            with pytest.raises(ScoringFailed):
                await decide(options, RIGHT)
            (verdict,), judge = await decide(options, RIGHT)
            assert verdict.value == 1.0 and judge.stats.cache_hits == 0

    asyncio.run(main())


def test_a_key_is_made_of_everything_asked() -> None:
    body = {"model": "a", "messages": [{"role": "user", "content": "é\ud800"}], "seed": 1}
    keys = {
        cache_key(body, 0), cache_key(body, 1), cache_key(body | {"seed": 2}, 0), cache_key(body | {"model": "b"}, 0),
        cache_key(body | {"messages": []}, 0), cache_key(body | {"max_tokens": 3}, 0),
    }  # fmt: skip
    assert len(keys) == 6 and cache_key(dict(reversed(body.items())), 0) in keys


WRITER = """
import sys
from pathlib import Path
from turnwise.ext.judge.judge import ReplyCache
cache = ReplyCache(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(200):
    cache.put(f"shared-{number}", sys.argv[2])
    cache.put(f"{sys.argv[2]}-{number}", sys.argv[2])
print("done", flush=True)
sys.stdin.readline()
"""


def test_processes_share_the_cache_and_a_killed_one_leaves_it_whole(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "done\n"
    finally:
        for writer in writers:
            writer.kill()  # without a word of farewell
            writer.communicate()
    cache = ReplyCache(tmp_path)
    for number in range(200):
        assert cache.get(f"shared-{number}") in ("one", "two")
        assert (cache.get(f"one-{number}"), cache.get(f"two-{number}")) == ("one", "two")
    cache.close()


def test_processes_that_open_the_cache_at_once_wait_for_each_other(tmp_path: Path) -> None:
    taken = sqlite3.connect(tmp_path / FILE, isolation_level=None, check_same_thread=False)
    taken.execute("CREATE TABLE other (key TEXT)")
    taken.execute("BEGIN IMMEDIATE")
    freed = threading.Timer(0.5, taken.execute, ("COMMIT",))
    freed.start()
    cache = ReplyCache(tmp_path)  # "database is locked" when it does not wait
    freed.join()
    taken.close()
    cache.put("a", "1")
    assert cache.get("a") == "1"
    cache.close()


def test_the_first_reply_stays_and_odd_text_is_kept(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path)
    cache.put("a", "1\ud800")
    cache.put("a", "0")
    assert cache.get("a") == "1?" and cache.get("b") is None
    cache.close()


def test_a_broken_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match=FILE):
        ReplyCache(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot open"):
        ReplyCache(tmp_path / "file")


def test_a_server_that_fails_in_every_way_mixes_nothing_up() -> None:
    async def main() -> None:
        faults = [500, 429, GARBAGE, DROP, says("prose"), answer({"choices": [{}]}), *[GOOD] * 7]
        async with unreliable(
            lambda number, _: faults[number * 5 % 13] if number >= 0 else GOOD, seconds=0.001
        ) as server:
            inquiries = [equivalence("n?", str(n), str(n if n % 3 else n + 1)) for n in range(60)]
            verdicts, judge = await decide(settings(server.url, retries=40, asks=40), *inquiries)
            assert [one.value for one in verdicts] == [float(n % 3 > 0) for n in range(60)]
            assert judge.stats.failed_requests > 20 and judge.stats.failed_verdicts == 0

    asyncio.run(main())


def test_images_are_sent_scaled_down(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    from turnwise.types import Image

    pillow.new("RGB", (400, 400), "red").save(tmp_path / "a.png")

    async def main() -> None:
        async with unreliable() as server:
            inquiry = evidence_only("red?", "red", "rubric", images=(Image(str(tmp_path / "a.png")),))
            (verdict,), _ = await decide(settings(server.url, max_pixels=100), inquiry)
            assert verdict.value == 1.0
            content = server.requests[0]["messages"][1]["content"]
            assert content[1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
            assert len(content[1]["image_url"]["url"]) < 2000

    asyncio.run(main())


def test_a_judge_is_shared_in_a_loop_measured_and_closed() -> None:
    async def main() -> dict[str, float]:
        async with unreliable(lambda number, _: 500 if number == 0 else GOOD) as server:
            judge = LlmJudge.shared(settings(server.url))
            assert LlmJudge.shared(settings(server.url)) is judge
            assert LlmJudge.shared(settings(server.url, votes=3)) is not judge
            assert take_metrics() == {}
            await judge.decide(RIGHT)
            metrics = take_metrics()
            assert take_metrics() == {}
            await close_loop_resources()
            assert LlmJudge.shared(settings(server.url)) is not judge
            return metrics

    metrics = asyncio.run(main())
    assert metrics["judge/verdicts"] == 1 and metrics["judge/requests"] == 3 and metrics["judge/failed_requests"] == 1
    assert metrics["judge/error_rate"] == pytest.approx(1 / 3)
    assert 0 < metrics["judge/latency_p50"] <= metrics["judge/latency_p95"]
    assert metrics["judge/prompt_tokens"] > 0 and "judge/agreement" not in metrics
    assert json.dumps(metrics)


def test_a_reason_before_the_verdict_is_kept_and_a_servers_reasoning_too(tmp_path: Path) -> None:
    thought = {"content": "FALSE", "reasoning_content": "41 is not 42"}
    split = answer({"choices": [{"message": thought, "finish_reason": "stop"}]})

    def plan(number: int, _: Any) -> Any:
        return {-1: GOOD, 0: says("41 differs.\nSo:\nVerdict: FALSE")}.get(number, split)

    async def main() -> None:
        async with unreliable(plan) as server:
            explained = settings(server.url, explain=True, cache=str(tmp_path))
            (verdict,), _ = await decide(explained, WRONG)
            assert (verdict.value, verdict.words) == (0.0, "41 differs.\nSo:\nVerdict: FALSE")
            (kept,), judge = await decide(explained, WRONG)
            assert kept == verdict and judge.stats.cache_hits == 1
            (plain,), _ = await decide(settings(server.url), WRONG)
            assert plain.value == 0.0 and "41 is not 42" in plain.words and plain.words.endswith("FALSE")

    asyncio.run(main())


def test_the_words_of_several_votes_are_all_there() -> None:
    assert (
        Verdict(1.0, (1.0, 0.0, 1.0), ("TRUE", "FALSE ", "TRUE")).words == "vote 1: TRUE\nvote 2: FALSE\nvote 3: TRUE"
    )
    assert Verdict(0.5).words == ""

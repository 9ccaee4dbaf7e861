"""The http runner against servers that misbehave: nothing is lost, mixed up, or taken for a zero."""

import asyncio
import contextlib
import json
import re
from collections import Counter

import pytest

from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, PluginError, ScoringFailed
from turnwise.scoring.runners import http
from turnwise.scoring.scorer import ScorerSpec, apply, evaluate

FAULTS = ("none", "500", "429", "503", "garbage", "drop", "cut", "other id", "no reward", "slow", "empty", "bad type")
NEVER = "never"


class Server:
    """A bare HTTP server in the test's event loop; `answer(request, attempt)` gives (status, body, headers)."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []
        self.attempts = Counter()
        self.now = self.most = 0
        self.open = {}

    @contextlib.asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for writer in self.open.values():
                writer.transport.abort()
            if self.open:
                await asyncio.wait(self.open)

    async def _serve(self, reader, writer):
        self.open[asyncio.current_task()] = writer
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET "):  # a server that only scores
                    writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
                    continue
                length = int(re.search(r"content-length: (\d+)", head, re.IGNORECASE)[1])
                request = json.loads(await reader.readexactly(length))
                self.requests.append((head, request))
                self.attempts[request["id"]] += 1
                self.now += 1
                self.most = max(self.most, self.now)
                try:
                    reply = await self.answer(request, self.attempts[request["id"]])
                    if reply == NEVER:
                        await reader.read()  # until the client hangs up
                finally:
                    self.now -= 1
                if reply is None or reply == NEVER:
                    writer.transport.abort()
                    return
                status, body, headers = reply
                length = headers.pop("Content-Length", len(body))
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n{lines}\r\n".encode() + body)
                await writer.drain()
                if length != len(body):
                    return writer.close()
        writer.close()


def good(request):
    """The reward is read from the trajectory, so that one for another would be seen."""
    index = int(json.loads(request["trajectory"]["ground_truth"]))
    body = {"id": request["id"], "reward": index + 0.25, "parts": {"index": index}, "turns": {"1": {"t": index}}}
    return 200, json.dumps(body).encode(), {}


async def misbehave(request, attempt):
    """Every request meets its own fault, two of three meet a second one."""
    index = int(json.loads(request["trajectory"]["ground_truth"]))
    fault = FAULTS[(index + 5 * attempt) % len(FAULTS)] if attempt <= 1 + (index % 3 > 0) else "none"
    await asyncio.sleep(((index * 7919) % 10) / 1000)  # answers overtake each other
    status, body, headers = good(request)
    wrong = {
        "500": (500, b"oops", {}),
        "429": (429, b"later", {"Retry-After": "0"}),
        "503": (503, body, {}),
        "garbage": (200, b"<html>hello</html>", {}),
        "drop": None,
        "cut": (200, body[:10], {"Content-Length": len(body)}),
        "other id": (200, json.dumps({"id": "0" * 32, "reward": -1000.0}).encode(), {}),
        "no reward": (200, json.dumps({"id": request["id"]}).encode(), {}),
        "empty": (200, b"", {}),
        "bad type": (200, json.dumps({"id": request["id"], "reward": "1000"}).encode(), {}),
    }
    if fault == "slow" and index % 2:
        return NEVER
    return wrong.get(fault, (status, body, headers))


@contextlib.asynccontextmanager
async def client(url, *, name="gsm8k", options=None, first_wait=0.001, **settings):
    config = ScoringConfig(**{"url": url, "timeout": 1.0, "retries": 4, **settings})
    runner = http.make(config)
    runner.first_wait = first_wait
    scorer = runner.scorer(ScorerSpec(name, options or {}))
    try:
        await runner.start()
        yield runner, scorer
    finally:
        await runner.stop()


def ask(answer, make, count=1, **settings):
    """(results, server, metrics) of so many trajectories."""

    async def main():
        server = Server(answer)
        async with server.running() as url, client(url, **settings) as (runner, scorer):
            calls = (evaluate(scorer, make(index)) for index in range(count))
            return await asyncio.gather(*calls, return_exceptions=True), server, runner.stats.take()

    return asyncio.run(main())


def test_256_requests_to_a_bad_server_all_get_their_own_score(trajectory):
    results, server, metrics = ask(misbehave, trajectory, 256, workers=24, timeout=2.0, retries=8)
    assert [result for result in results if isinstance(result, Exception)] == []
    assert [result.reward for result in results] == [index + 0.25 for index in range(256)]
    assert all(result.parts == {"index": index} for index, result in enumerate(results))
    assert all(result.turns == {1: {"t": index}} for index, result in enumerate(results))
    assert len(server.attempts) == 256, "a request keeps its id when it is tried again"
    assert len({request["session"] for _, request in server.requests}) == 256
    assert 1 < server.most <= 24
    assert metrics["scoring/calls"] == 256
    assert metrics["scoring/failures"] == 0
    assert metrics["scoring/attempts"] >= sum(server.attempts.values()) > 2 * 256  # some never reached it
    assert metrics["scoring/retries"] == metrics["scoring/attempts"] - 256


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ((500, b"out of memory", {}), "answers 500: out of memory"),
        ((429, b"", {"Retry-After": "0"}), "answers 429"),
        ((200, b"{}", {}), "belongs to another request"),
        ((200, b"[1", {}), "not understood"),
        ((200, b'{"id": "x", "reward": 1.0}', {}), "belongs to another request ('x'"),
        (None, "no answer from the reward server"),
    ],
)
def test_a_failure_that_stays_is_no_zero(trajectory, reply, text):
    async def answer(request, attempt):
        return reply and (*reply[:2], dict(reply[2]))

    (result,), server, metrics = ask(answer, trajectory, retries=2)
    assert isinstance(result, ScoringFailed)
    assert text in str(result) and "(attempt 3 of 3)" in str(result)
    assert server.attempts.total() == 3
    assert (metrics["scoring/failures"], metrics["scoring/retries"]) == (1, 2)


def test_an_absent_server_leaves_the_trajectory_out(trajectory):
    async def main():
        server = Server(misbehave)
        async with server.running() as url:
            pass
        async with client(url, retries=1) as (_, scorer):
            one = trajectory(1)
            await apply(scorer, one)
            return one

    one = asyncio.run(main())
    assert one.reward is None
    assert one.failure.startswith("scoring: no answer from the reward server http://127.0.0.1:")


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ({"f2p_count": 9, "f2p_total": 10}, 0.9),
        ({"reward": None, "f2p_count": 0, "f2p_total": 3}, 0.0),
        ({"reward": 0.5, "f2p_count": 9, "f2p_total": 10}, 0.5),
    ],
)
def test_tests_that_passed_stand_in_for_a_reward(trajectory, body, reward):
    async def answer(request, attempt):
        return 200, json.dumps({"id": request["id"], **body}).encode(), {}

    (result,), _, _ = ask(answer, trajectory)
    assert result.reward == reward
    assert result.parts == ({"f2p": reward} if body.get("reward") is None else {})


def test_no_tests_at_all_say_nothing(trajectory):
    async def answer(request, attempt):
        return 200, json.dumps({"id": request["id"], "f2p_count": 0, "f2p_total": 0}).encode(), {}

    (result,), server, metrics = ask(answer, trajectory)
    assert isinstance(result, ScoringFailed)
    assert (server.attempts.total(), metrics["scoring/failures"]) == (1, 1)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_for_a_person_and_not_tried_again(trajectory, status):
    async def answer(request, attempt):
        return status, b"who are you?", {}

    (result,), server, _ = ask(answer, trajectory)
    assert isinstance(result, ConfigError)
    assert f"refuses the request with {status}: who are you?" in str(result)
    assert server.attempts.total() == 1


def test_a_server_that_scores_turns_that_are_not_there_is_a_bug(trajectory):
    async def answer(request, attempt):
        return 200, json.dumps({"id": request["id"], "reward": 1.0, "turns": {"9": {"a": 1}}}).encode(), {}

    (result,), _, _ = ask(answer, trajectory)
    assert isinstance(result, PluginError)


def test_the_request_says_which_instance_and_session(trajectory, monkeypatch):
    async def answer(request, attempt):
        return good(request)

    def make(index):
        one = trajectory(3, sibling=index)
        if index == 1:
            one.artifacts["session"] = "env-17"
        return one

    monkeypatch.setenv("TURNWISE_REWARD_TOKEN", "secret")
    _, server, _ = ask(answer, make, 2, name="my.module:f", options={"a": 1})
    asked = [request for _, request in server.requests]
    assert {request["session"] for request in asked} == {"s3/0/0", "env-17"}
    assert all((r["instance"], r["scorer"], r["options"]) == ("s3", "my.module:f", {"a": 1}) for r in asked)
    assert all("authorization: bearer secret" in head.lower() for head, _ in server.requests)
    assert all(head.startswith("POST /compute_reward ") for head, _ in server.requests)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "needs scoring.url"),
        ({"url": "localhost:1"}, "begins with http"),
        ({"url": "http://me:pass@host"}, "holds no password"),
        ({"url": "http://host", "retries": -1}, "must not be negative"),
    ],
)
def test_mistakes_in_the_config_are_found_before_anything_starts(settings, text):
    with pytest.raises(ConfigError, match=text):
        http.make(ScoringConfig(**settings))


def test_scorers_are_checked_before_anything_starts():
    runner = http.make(ScoringConfig(url="http://127.0.0.1:1/compute_reward"))
    assert runner.url == "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="unknown scorer"):
        runner.scorer(ScorerSpec("gsm8"))
    with pytest.raises(ConfigError, match="unknown option"):
        runner.scorer(ScorerSpec("exact_match", {"none": 1}))

"""Requests to endpoints that are slow, busy, broken, gone and back; which endpoint is asked; when none is."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from judge_servers import DROP, EMPTY, GARBAGE, GOOD, HANG, answer, real_server, says, settings, unreliable

from turnwise.errors import ConfigError, ScoringFailed
from turnwise.ext.judge.client import Breaker, JudgeClient
from turnwise.ext.judge.judge import LlmJudge
from turnwise.ext.judge.prompts import equivalence

RIGHT, WRONG = equivalence("6*7?", "42", "42"), equivalence("6*7?", "42", "41")


def body(text: str = "42") -> dict[str, Any]:
    messages = equivalence("6*7?", "42", text).messages()
    return {"model": "rule-judge", "messages": messages, "max_tokens": 16}


async def using(client: JudgeClient, work: Callable[[JudgeClient], Awaitable[Any]]) -> Any:
    try:
        return await work(client)
    finally:
        await client.close()


def test_the_real_rule_judge_is_asked_over_http() -> None:
    async def main() -> None:
        async with real_server() as url:
            judge = LlmJudge(settings(url))
            try:
                verdicts = await asyncio.gather(*(judge.decide(RIGHT if n % 2 else WRONG) for n in range(10)))
            finally:
                await judge.close()
            assert [one.value for one in verdicts] == [0.0, 1.0] * 5
            assert (judge.stats.requests, judge.stats.joined) == (1 + 2, 8)
            assert judge.stats.prompt_tokens > 100 and judge.stats.completion_tokens == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    "fault", [500, 502, 503, 429, 408, 404, 401, 301, DROP, GARBAGE, EMPTY, answer([1]), answer("x")]
)
def test_what_may_pass_is_tried_again(fault: Any) -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: fault if 0 <= number < 2 else GOOD) as server:
            client = JudgeClient(settings(server.url))
            reply = await using(client, lambda it: it.complete(body()))
            assert reply.text == "TRUE" and len(server.requests) == 3
            assert (client.stats.requests, client.stats.failed_requests) == (3, 2)

    asyncio.run(main())


def test_a_hanging_server_is_given_up_and_tried_again() -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: HANG if number == 0 else GOOD) as server:
            client = JudgeClient(settings(server.url, timeout=0.5))
            assert (await using(client, lambda it: it.complete(body()))).text == "TRUE"

    asyncio.run(main())


def test_a_failure_that_stays_is_told_with_its_reason_and_no_zero() -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: 500 if number >= 0 else GOOD) as server:
            with pytest.raises(ScoringFailed, match=r"answered 500: .*spoilt.* \(try 3 of 3\)"):
                await using(JudgeClient(settings(server.url, retries=2)), lambda it: it.complete(body()))
            assert len(server.requests) == 3
        with pytest.raises(ScoringFailed, match="ConnectError"):
            await using(JudgeClient(settings(server.url, retries=1)), lambda it: it.complete(body()))

    asyncio.run(main())


def test_a_request_that_no_endpoint_can_serve_is_not_repeated() -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: 400 if number >= 0 else GOOD) as server:
            client = JudgeClient(settings(server.url, breaker_failures=1))
            for _ in range(3):
                with pytest.raises(ScoringFailed, match="refused the request.*400"):
                    await client.complete(body())
            await client.close()
            assert len(server.requests) == 3 and not client.endpoints[0].breaker.is_open

    asyncio.run(main())


def test_the_time_a_busy_server_asks_for_is_waited_unless_it_is_absurd() -> None:
    async def main() -> None:
        busy = answer({}, 429, "Retry-After: 0\r\n")
        async with unreliable(lambda number, _: busy if number == 0 else GOOD) as server:
            client = JudgeClient(settings(server.url, backoff=0.001, breaker_failures=1))
            assert (await using(client, lambda it: it.complete(body()))).text == "TRUE"
        absurd = answer({}, 429, "Retry-After: 86400\r\n")
        async with unreliable(lambda number, _: absurd if number >= 0 else GOOD) as server:
            with pytest.raises(ScoringFailed, match=r"429.*try 1 of 5"):
                await using(JudgeClient(settings(server.url)), lambda it: it.complete(body()))

    asyncio.run(main())


def test_the_model_is_asked_for_once_and_must_be_clear() -> None:
    async def main() -> None:
        async with unreliable() as server:
            judge = LlmJudge(settings(server.url))
            await asyncio.gather(*(judge.decide(equivalence("q", "a", f"{n}")) for n in range(8)))
            await judge.close()
            assert server.lists == 1 and {one["model"] for one in server.requests} == {"rule-judge"}
        two = answer({"data": [{"id": "a"}, {"id": "b"}]})
        async with unreliable(lambda number, _: two if number < 0 else GOOD) as server:
            with pytest.raises(ConfigError, match=r"serves 2 models \(a, b\)"):
                await using(JudgeClient(settings(server.url)), lambda it: it.model())
            client = JudgeClient(settings(server.url, model="rule-judge"))
            assert await using(client, lambda it: it.model()) == "rule-judge"
        async with unreliable(lambda number, _: answer({"models": []}) if number < 0 else GOOD) as server:
            with pytest.raises(ScoringFailed, match="does not list models"):
                await using(JudgeClient(settings(server.url, retries=0)), lambda it: it.model())

    asyncio.run(main())


def test_endpoints_share_the_load_and_the_limit_holds_over_all() -> None:
    async def main() -> None:
        async with unreliable(seconds=0.01) as one, unreliable(seconds=0.01) as two:
            client = JudgeClient(settings(one.url, two.url, model="rule-judge", concurrency=6))
            await asyncio.gather(*(client.complete(body(str(n))) for n in range(40)))
            await client.close()
            assert len(one.requests) + len(two.requests) == 40
            assert min(len(one.requests), len(two.requests)) >= 12
            assert one.most_open <= 3 and two.most_open <= 3

    asyncio.run(main())


def test_a_slower_endpoint_gets_less() -> None:
    async def main() -> None:
        async with unreliable() as quick, unreliable() as stuck:
            stuck.gate = asyncio.Event()
            client = JudgeClient(settings(quick.url, stuck.url, model="rule-judge", concurrency=4))
            work = [asyncio.ensure_future(client.complete(body(str(n)))) for n in range(30)]
            while len(quick.requests) + len(stuck.requests) < 30:
                await asyncio.sleep(0.005)
            assert len(stuck.requests) <= 3
            stuck.gate.set()
            await asyncio.gather(*work)
            await client.close()

    asyncio.run(main())


def test_a_request_that_fails_here_goes_elsewhere_at_once() -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: DROP if number >= 0 else GOOD) as bad, unreliable() as good:
            client = JudgeClient(settings(bad.url, good.url, retries=1, backoff=1000.0, breaker_failures=3))
            for _ in range(10):
                assert (await client.complete(body())).text == "TRUE"
            await client.close()
            assert len(bad.requests) == 3 and len(good.requests) == 10  # then the breaker spares even the tries

    asyncio.run(main())


def test_an_endpoint_with_another_model_is_not_used() -> None:
    async def main() -> None:
        async with unreliable() as one, unreliable(model="someone-else") as two:
            client = JudgeClient(settings(one.url, two.url, breaker_failures=2))
            assert await client.model() == "rule-judge"
            for n in range(6):
                await client.complete(body(str(n)))
            await client.close()
            assert (
                len(one.requests) == 6 and two.requests == [] and "serves someone-else" in client.endpoints[1].problem
            )

    asyncio.run(main())


def test_the_breaker_spares_a_broken_endpoint_and_lets_one_request_find_out() -> None:
    clock = [0.0]
    breaker = Breaker(3, 10.0, lambda: clock[0])
    for _ in range(2):
        breaker.begin()
        breaker.failed()
    assert breaker.allows and not breaker.is_open
    breaker.begin()
    breaker.failed()
    assert breaker.is_open and not breaker.allows
    clock[0] = 9.9
    assert not breaker.allows
    clock[0] = 10.0
    assert breaker.allows
    breaker.begin()
    assert not breaker.allows  # one is enough to find out
    breaker.failed()
    clock[0] = 19.9
    assert not breaker.allows
    clock[0] = 20.0
    breaker.begin()
    breaker.abandoned()
    assert breaker.allows  # nothing was learnt: the next one may try
    breaker.begin()
    breaker.succeeded()
    assert breaker.allows and not breaker.is_open
    breaker.begin()
    breaker.failed()
    assert not breaker.is_open  # the count begins anew


def test_in_an_outage_requests_fail_without_being_sent_and_afterwards_succeed() -> None:
    async def main() -> None:
        down = [True]
        async with unreliable(lambda number, _: 503 if down[0] and number >= 0 else GOOD) as server:
            client = JudgeClient(settings(server.url, retries=0, breaker_failures=2, breaker_seconds=30.0))
            clock = [0.0]
            client.endpoints[0].breaker.clock = lambda: clock[0]
            for _ in range(2):
                with pytest.raises(ScoringFailed, match="503"):
                    await client.complete(body())
            for _ in range(5):
                with pytest.raises(ScoringFailed, match=r"failed 2 times in a row and is paused: .*503"):
                    await client.complete(body())
            assert len(server.requests) == 2
            clock[0] = 31.0
            with pytest.raises(ScoringFailed, match="503"):
                await client.complete(body())
            assert len(server.requests) == 3 and not client.endpoints[0].breaker.allows
            clock[0], down[0] = 62.0, False
            assert (await client.complete(body())).text == "TRUE"
            assert not client.endpoints[0].breaker.is_open
            await client.close()

    asyncio.run(main())


def test_those_who_come_back_with_a_recovering_endpoint_wait_for_the_one_that_finds_out() -> None:
    async def main() -> None:
        down = [True]
        async with unreliable(lambda number, _: 500 if down[0] and number >= 0 else GOOD) as server:
            client = JudgeClient(settings(server.url, retries=0, breaker_failures=1, breaker_seconds=0.0))
            with pytest.raises(ScoringFailed):
                await client.complete(body())
            down[0], server.gate = False, asyncio.Event()
            work = [asyncio.ensure_future(client.complete(body(str(n)))) for n in range(8)]
            while len(server.requests) < 2:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert len(server.requests) == 2  # the others wait for this one
            server.gate.set()
            assert len(await asyncio.gather(*work)) == 8
            await client.close()

    asyncio.run(main())


def test_a_cancelled_request_says_nothing_about_the_endpoint() -> None:
    async def main() -> None:
        async with unreliable() as server:
            server.gate = asyncio.Event()
            client = JudgeClient(settings(server.url, breaker_failures=1, model="rule-judge"))
            work = asyncio.ensure_future(client.complete(body()))
            while not server.requests:
                await asyncio.sleep(0.005)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            endpoint = client.endpoints[0]
            assert work.cancelled() and endpoint.in_flight == 0 and not endpoint.breaker.is_open
            await client.close()

    asyncio.run(main())


def test_replies_without_a_token_count_are_counted_as_such() -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: says("TRUE") if number >= 0 else GOOD) as server:
            client = JudgeClient(settings(server.url))
            assert (await using(client, lambda it: it.complete(body()))).prompt_tokens is None
            assert client.stats.unmetered_replies == 1 and client.stats.prompt_tokens == 0

    asyncio.run(main())

"""A judge's budget: what counts, that nothing becomes a zero, and what is said when it is spent."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from judge_servers import GOOD, real_server, says, settings, unreliable

from turnwise.config import ScoringConfig
from turnwise.config.choices import ScoringRun
from turnwise.errors import ConfigError, ScoringFailed, TurnwiseError
from turnwise.ext.judge.endpoint_check import probe_all
from turnwise.ext.judge.judge import LlmJudge
from turnwise.ext.judge.prompts import Inquiry, equivalence
from turnwise.scoring.event_loop_resources import close_loop_resources, take_metrics
from turnwise.scoring.service import Scoring


def inquiry(number: int) -> Inquiry:
    return equivalence("6*7?", "42", str(number))


def test_requests_are_counted_with_each_try_and_equal_ones_and_the_cache_are_free(tmp_path: Path) -> None:
    async def main() -> None:
        async with unreliable(lambda number, _: 500 if number == 0 else GOOD) as server:
            given = settings(server.url, max_requests=3, cache=str(tmp_path))
            judge = LlmJudge.shared(given)
            assert [(await judge.decide(inquiry(n))).value for n in (1, 2, 1)] == [0.0, 0.0, 0.0]
            metrics = take_metrics()
            assert (metrics["judge/requests_left"], metrics["judge/over_budget"]) == (0.0, 0.0)
            found = await asyncio.gather(*(judge.decide(inquiry(n)) for n in (1, 3, 4, 4)), return_exceptions=True)
            assert found[0] == await judge.decide(inquiry(1)) and len(server.requests) == 3
            assert [str(one) for one in found[1:]] == ["the judge's budget is spent (max_requests=3)"] * 3
            assert all(isinstance(one, ScoringFailed) for one in found[1:])
            metrics = take_metrics()
            assert (metrics["judge/over_budget"], metrics["judge/failed_verdicts"]) == (2.0, 3.0)
            assert metrics["judge/cache_hits"] == 2.0 and metrics["judge/failed_requests"] == 0.0
            await close_loop_resources()

    asyncio.run(main())


def test_tokens_are_counted_and_a_server_that_counts_none_is_no_silent_way_around() -> None:
    async def main() -> None:
        async with real_server() as url:
            judge = LlmJudge.shared(settings(url, max_tokens_total=1))
            assert (await judge.decide(inquiry(42))).value == 1.0  # known only when it is there
            with pytest.raises(ScoringFailed, match=r"spent \(max_tokens_total=1\)"):
                await judge.decide(inquiry(41))
            assert take_metrics()["judge/tokens_left"] == 0.0
            await close_loop_resources()
        async with unreliable(lambda number, _: says("TRUE") if number >= 0 else GOOD) as server:
            judge = LlmJudge(settings(server.url, max_tokens_total=1000))
            with pytest.raises(ConfigError, match="does not count tokens: set max_requests"):
                await judge.decide(inquiry(42))
            await judge.close()

    asyncio.run(main())


def test_a_run_may_be_stopped_and_a_probe_has_no_budget() -> None:
    async def main() -> None:
        async with real_server() as url:
            given = settings(url, max_requests=1, when_spent="stop")
            judge = LlmJudge(given)
            await judge.decide(inquiry(42))
            with pytest.raises(TurnwiseError, match=r"spent \(max_requests=1\): resume the run"):
                await judge.decide(inquiry(41))
            await judge.close()
            assert [report.is_good for report in await probe_all(given)] == [True]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_requests": 0}, "max_requests=0 must be at least 1"),
        ({"max_tokens_total": -5}, "max_tokens_total=-5 must be at least 1"),
        ({"when_spent": "zero"}, "when_spent='zero'"),
    ],
)
def test_what_is_no_budget_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        settings("http://a/v1", **options)


@pytest.mark.parametrize("options", [{"judge": {"max_requests": 5}}, {"tapo": {"judge_options": {"max_requests": 5}}}])
def test_several_processes_cannot_share_one(options: dict[str, Any]) -> None:
    (name,) = options
    scorers = {"default": name}
    Scoring.of(ScoringConfig(scorers=scorers, options=options), ["x"])
    with pytest.raises(ConfigError, match="max_requests=5 is counted in this process, but scoring.run=pool"):
        Scoring.of(ScoringConfig(scorers=scorers, options=options, run=ScoringRun.pool, workers=1), ["x"])

"""Failures of scoring: tried again, counted, and too many of them stop the run."""

import asyncio

import pytest

from turnwise.errors import DataError, ScoringFailed, TurnwiseError
from turnwise.scoring.failures import ScoringStats, check_scoring, counted, retry_policy, score_retrying, within
from turnwise.scoring.scorer import apply, evaluate
from turnwise.system.retrying import AttemptFailed
from turnwise.types import Message, Role, Sample, StopReason, Trajectory


def episode(failure: str | None = None, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    sample = Sample("s", (Message(Role.USER, "?"),), "arithmetic", "1")
    return Trajectory(sample, 0, 0, [], [], [], stop, 1.0, failure=failure)


def run(outcomes, retries, stats):
    """What comes out when the attempts end so, one after the other."""
    left = list(outcomes)

    async def attempt():
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return asyncio.run(score_retrying(attempt, retry_policy(retries), stats, scorer="mine")), left


def test_lost_attempts_are_tried_again_and_counted():
    stats = ScoringStats()
    assert run([AttemptFailed("a"), AttemptFailed("b"), 5.0, "not reached"], 2, stats) == (5.0, ["not reached"])
    with pytest.raises(ScoringFailed, match=r"d \(attempt 2 of 2\)"):
        run([AttemptFailed("c"), AttemptFailed("d")], 1, stats)
    assert (stats.calls, stats.attempts, stats.retries, stats.failures) == (2, 5, 3, 1)


def test_what_a_scorer_raises_is_counted_and_not_tried_again():
    stats = ScoringStats()
    for error, said in ((ValueError("a bug"), "scorer mine raised ValueError: a bug"), (ScoringFailed("down"), "down")):
        with pytest.raises(ScoringFailed, match=said):
            run([error, 1.0], 3, stats)
    with pytest.raises(DataError, match="row 3"):
        run([DataError("row 3"), 1.0], 3, stats)
    assert (stats.attempts, stats.retries, stats.failures) == (3, 0, 2)


def test_a_server_that_asks_for_a_long_wait_is_not_waited_for():
    with pytest.raises(ScoringFailed, match="maintenance"):
        run([AttemptFailed("maintenance", wait=3600), 1.0], 3, ScoringStats())


def test_metrics_are_of_the_time_since_they_were_taken():
    stats = ScoringStats()

    async def down(trajectory):
        raise ScoringFailed("down")

    one = episode()
    asyncio.run(apply(counted(down, stats), one))
    run([AttemptFailed("a"), 5.0], 1, stats)
    metrics = stats.take()
    assert one.failure == "scoring: down"
    assert 0 <= metrics.pop("scoring/seconds") < 60, "not a moment in time"
    assert metrics == {
        "scoring/calls": 2, "scoring/attempts": 3, "scoring/retries": 1, "scoring/failures": 1,
        "scoring/failure_rate": 0.5, "scoring/retry_rate": 1 / 3,
    }  # fmt: skip
    assert (stats, stats.take()) == (ScoringStats(), {})


@pytest.mark.parametrize(("failed", "stops"), [(0, False), (2, False), (3, True), (10, True)])
def test_too_many_failures_of_scoring_stop_the_run(failed, stops):
    trajectories = [episode("scoring: the judge is down") for _ in range(failed)]
    trajectories += [episode() for _ in range(10 - failed)]
    if not stops:
        return check_scoring(trajectories, 0.2)
    with pytest.raises(TurnwiseError, match=rf"{failed} of 10 .*max_failures=0.2.*\({failed}\): scoring: the judge"):
        check_scoring(trajectories, 0.2)


def test_episodes_that_failed_by_themselves_were_never_scored():
    others = [episode("the endpoint is gone", StopReason.FAILED) for _ in range(8)]
    check_scoring(others, 0.0)
    with pytest.raises(TurnwiseError, match="1 of 2 trajectories"):
        check_scoring([*others, episode(), episode("scoring: no")], 0.2)
    check_scoring([], 0.2)


def test_a_scorer_that_never_returns_is_a_failure_and_not_the_end_of_the_run(monkeypatch):
    async def endless(trajectory):
        await asyncio.Event().wait()

    async def late(trajectory):
        raise TimeoutError("of its own")

    monkeypatch.setattr("turnwise.scoring.failures.PATIENCE", 1)
    with pytest.raises(ScoringFailed, match=r"endless took longer than 0.05 s, 1 times scoring.timeout"):
        asyncio.run(evaluate(within(endless, 0.05), None))
    with pytest.raises(ScoringFailed, match="late raised TimeoutError: of its own"):
        asyncio.run(evaluate(within(late, 60.0), None))

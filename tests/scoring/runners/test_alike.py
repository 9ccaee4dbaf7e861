"""All runners say the same of the same trajectories: numbers, parts, turns, exceptions, failures."""

import asyncio
import contextlib

import pytest

from turnwise.config import ScoringConfig
from turnwise.config.choices import ScoringRun
from turnwise.errors import ScoringFailed, TurnwiseError
from turnwise.scoring.failures import check_scoring
from turnwise.scoring.scorer import ScorerSpec, apply, apply_all, evaluate
from turnwise.scoring.service import make_runner

RUNS = [ScoringRun.pool, ScoringRun.http, ScoringRun.batch]
GOOD = ["number", "sync_number", "parts", "whole", "verl", "remarked"]
RAISED = ["value_error", "odd", "unicode_error"]
BAD = ["value_error", "odd", "unicode_error", "data_error", "not_finite", "not_a_number", "wrong_turn"]


@contextlib.asynccontextmanager
async def runner_for(run, served, serving):
    """The runner, behind it a real server where it needs one."""
    async with contextlib.AsyncExitStack() as stack:
        config = ScoringConfig(run=run, workers=2, retries=1, batch_size=4)
        if run is ScoringRun.http:
            server = pytest.importorskip("turnwise.scoring.runners.server")
            inline = make_runner(ScoringConfig())
            settings = server.RewardServerSettings(scorers=tuple(served))
            config.url = await stack.enter_async_context(serving(server.make_app(inline, None, settings)))
        runner = make_runner(config)
        stack.push_async_callback(runner.stop)
        await runner.start()
        yield runner


async def outcomes(run, specs, trajectories, serving):
    """By scorer: the scores, or what was raised."""
    async with runner_for(run, [spec.name for spec in specs], serving) as runner:
        found = {}
        for spec in specs:
            scorer = runner.scorer(spec)
            found[spec.name.rpartition(":")[2]] = await asyncio.gather(
                *(evaluate(scorer, trajectory) for trajectory in trajectories), return_exceptions=True
            )
        return found


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.value)
def test_scores_and_exceptions_are_those_of_inline(run, scorers, trajectory, serving):
    trajectories = [trajectory(index) for index in range(9)]
    specs = [ScorerSpec(f"{scorers}:{name}") for name in (*GOOD, *BAD)]
    specs[1].options.update(scale=0.1, shift=3)
    expected = asyncio.run(outcomes(ScoringRun.inline, specs, trajectories, serving))
    found = asyncio.run(outcomes(run, specs, trajectories, serving))
    for name in GOOD:
        assert found[name] == expected[name], name
        assert len({score.reward for score in expected[name]}) > 1 or name == "verl"
    for name in BAD:
        for ours, theirs in zip(found[name], expected[name], strict=True):
            assert isinstance(theirs, Exception)
            assert type(ours).__qualname__ == type(theirs).__qualname__
            assert isinstance(ours, type(theirs).__mro__[1]) or type(ours) is type(theirs)
            assert str(ours) == str(theirs).replace("\ud800", "\\ud800" if run is not ScoringRun.batch else "\ud800")
            assert set(getattr(theirs, "__notes__", [])) <= set(getattr(ours, "__notes__", []))
    failures = {name: found[name][4] for name in RAISED}
    assert all(type(failure) is ScoringFailed for failure in failures.values())
    said = str(failures["value_error"])
    assert "value_error raised ValueError: no such thing (rewards.py, line" in said and "\n" not in said


@pytest.mark.parametrize("run", [ScoringRun.inline, *RUNS], ids=lambda run: run.value)
def test_a_scorer_that_raises_is_counted_as_a_failure_with_its_cause(run, scorers, trajectory, serving):
    name = f"{scorers}:value_error"

    async def main():
        async with runner_for(run, [name], serving) as runner:
            many = [trajectory(index) for index in range(3)]
            await apply_all(runner.scorer(ScorerSpec(name)), many)
            return many, runner.stats.take()

    many, metrics = asyncio.run(main())
    assert [one.reward for one in many] == [None] * 3
    assert {one.failure for one in many} == {many[0].failure}
    assert "value_error raised ValueError: no such thing (rewards.py, line" in many[0].failure
    assert (metrics["scoring/failures"], metrics["scoring/failure_rate"]) == (3, 1.0)
    with pytest.raises(
        TurnwiseError, match="3 of 3 trajectories could not be scored .*raised ValueError: no such thing"
    ):
        check_scoring(many, 0.2)


@pytest.mark.parametrize("run", [ScoringRun.inline, *RUNS], ids=lambda run: run.value)
def test_what_a_scorer_calls_a_failure_leaves_the_trajectory_without_reward(run, scorers, trajectory, serving):
    async def main():
        name = f"{scorers}:broken_service"
        async with runner_for(run, [name], serving) as runner:
            scorer = runner.scorer(ScorerSpec(name))
            one = trajectory(1)
            await apply(scorer, one)
            with pytest.raises(ScoringFailed):
                await evaluate(scorer, trajectory(2))
            return one, getattr(runner, "stats", None)

    one, stats = asyncio.run(main())
    assert (one.reward, one.failure) == (None, "scoring: the judge is down")
    if stats is not None:
        metrics = stats.take()
        assert (metrics["scoring/calls"], metrics["scoring/failures"], metrics["scoring/retries"]) == (2, 2, 0)
        assert metrics["scoring/failure_rate"] == 1.0
        assert stats.take() == {}

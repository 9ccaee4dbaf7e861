"""An engine that goes away costs a turn another try, not the run: the same tokens and noise are asked for again."""

import asyncio
from dataclasses import replace

import pytest

from turnwise.errors import EngineError, EngineLost
from turnwise.reports.evaluation import EvalReport, step_metrics
from turnwise.rollout import chat_backends
from turnwise.rollout.tools.calculate import calculate
from turnwise.system.retrying import RetryPolicy
from turnwise.types import StopReason

AT_ONCE = RetryPolicy(retries=2, first_wait=0.0)


def shown(rollouts, call, lose, *, release=False):
    """A show of two turns whose sampler loses its engine at the calls of `generate` in `lose`, counted from 0."""
    rollout = rollouts.make([call("calculate", expression="6*7"), "42"], tools=[calculate])
    calls, asked, real = iter(range(10**6)), [], rollout.sampler.generate

    async def generate(request):
        asked.append(request)
        if next(calls) in lose:
            raise EngineLost("node 3 left", elsewhere=len(asked) % 2 == 0)
        return await real(request)

    async def gone(conversation):
        raise EngineLost("node 3 left")

    rollout.sampler.generate = generate
    if release:
        rollout.sampler.release = gone
    make = rollout.context.make_backend

    def backend(*args):
        made = make(*args)
        made.retry = AT_ONCE
        return made

    rollout.context = replace(rollout.context, make_backend=backend)
    return rollout, asked


def test_a_lost_turn_is_asked_again_as_it_was(rollouts, call):
    plain = rollouts.make([call("calculate", expression="6*7"), "42"], tools=[calculate]).play()
    rollout, asked = shown(rollouts, call, lose={1, 2}, release=True)
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.failure is None
    assert trajectory.facts.engine_lost == ["turn 1: node 3 left"] * 2
    assert [list(ledger.token_ids) for ledger in trajectory.segments] == [list(one.token_ids) for one in plain.segments]
    first, second, third = asked[1:]
    assert first is second is third, "the same tokens so far, the same noise, the same conversation"
    assert plain.facts.engine_lost == []
    assert step_metrics([trajectory, plain])["rollout/engine_lost"] == 2
    assert "rollout/engine_lost" not in step_metrics([plain])


def test_after_the_last_try_the_episode_fails_and_no_other(rollouts, call):
    rollout, _ = shown(rollouts, call, lose={1, 2, 3})

    async def siblings():
        return await rollout.episode(), await rollout.episode(sibling=1)

    lost, good = asyncio.run(siblings())
    assert lost.stop_reason is StopReason.FAILED
    assert lost.failure == "the engine was lost in turn 1, 3 tries: node 3 left"
    assert len(lost.facts.engine_lost) == 3 and len(lost.turns) == 1
    assert good.stop_reason is StopReason.ANSWERED
    report = EvalReport(run=None, seconds=1.0, tokens_per_second=1.0, sources={}, trajectories=[lost, good])
    assert "the engine was lost 3 time(s) in 1 episode(s), such as in turn 1: node 3 left" in report.warnings


def test_any_other_engine_error_stops_the_run(rollouts):
    rollout = rollouts.make(["42"])
    rollout.sampler.error = EngineError("the disk is full")
    with pytest.raises(EngineError, match="the disk is full"):
        rollout.play()
    assert chat_backends.LOST_RETRY.retries > 0, "who does not say how often gets a retry"

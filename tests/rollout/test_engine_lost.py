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


def shown(theatre, call, lose, *, release=False):
    """A show of two turns whose sampler loses its engine at the calls of `generate` in `lose`, counted from 0."""
    show = theatre.show([call("calculate", expression="6*7"), "42"], tools=[calculate])
    calls, asked, real = iter(range(10**6)), [], show.sampler.generate

    async def generate(request):
        asked.append(request)
        if next(calls) in lose:
            raise EngineLost("node 3 left", elsewhere=len(asked) % 2 == 0)
        return await real(request)

    async def gone(conversation):
        raise EngineLost("node 3 left")

    show.sampler.generate = generate
    if release:
        show.sampler.release = gone
    make = show.context.make_backend

    def backend(*args):
        made = make(*args)
        made.retry = AT_ONCE
        return made

    show.context = replace(show.context, make_backend=backend)
    return show, asked


def test_a_lost_turn_is_asked_again_as_it_was(theatre, call):
    plain = theatre.show([call("calculate", expression="6*7"), "42"], tools=[calculate]).play()
    show, asked = shown(theatre, call, lose={1, 2}, release=True)
    trajectory = show.play()
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.failure is None
    assert trajectory.facts.engine_lost == ["turn 1: node 3 left"] * 2
    assert [list(ledger.token_ids) for ledger in trajectory.segments] == [list(one.token_ids) for one in plain.segments]
    first, second, third = asked[1:]
    assert first is second is third, "the same tokens so far, the same noise, the same conversation"
    assert plain.facts.engine_lost == []
    assert step_metrics([trajectory, plain])["rollout/engine_lost"] == 2
    assert "rollout/engine_lost" not in step_metrics([plain])


def test_after_the_last_try_the_episode_fails_and_no_other(theatre, call):
    show, _ = shown(theatre, call, lose={1, 2, 3})

    async def siblings():
        return await show.episode(), await show.episode(sibling=1)

    lost, good = asyncio.run(siblings())
    assert lost.stop_reason is StopReason.FAILED
    assert lost.failure == "the engine was lost in turn 1, 3 tries: node 3 left"
    assert len(lost.facts.engine_lost) == 3 and len(lost.turns) == 1
    assert good.stop_reason is StopReason.ANSWERED
    report = EvalReport(run=None, seconds=1.0, tokens_per_second=1.0, sources={}, trajectories=[lost, good])
    assert "the engine was lost 3 time(s) in 1 episode(s), such as in turn 1: node 3 left" in report.warnings


def test_any_other_engine_error_stops_the_run(theatre):
    show = theatre.show(["42"])
    show.sampler.error = EngineError("the disk is full")
    with pytest.raises(EngineError, match="the disk is full"):
        show.play()
    assert chat_backends.LOST_RETRY.retries > 0, "who does not say how often gets a retry"

"""The batch runner: many trajectories in one call, each with its own result."""

import asyncio
import contextlib
import json

import pytest

from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, PluginError, ScoringFailed
from turnwise.scoring.runners import batch
from turnwise.scoring.scorer import ScorerSpec, evaluate

FUNCTIONS = """
import asyncio, json, time
from turnwise.errors import ScoringFailed
from turnwise.scoring.scorer import Score


NOT_A_FUNCTION = 3


def note(trajectories, path):
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps([int(one.sample.ground_truth) for one in trajectories]) + "\\n")


def indices(trajectories):
    return [int(one.sample.ground_truth) for one in trajectories]


def sync(trajectories, *, path=None):
    note(trajectories, path)
    return indices(trajectories)


async def waits(trajectories, *, path=None):
    note(trajectories, path)
    await asyncio.sleep(0)
    return [Score(i, {"i": i}, {0: {"t": i}}) if i % 2 else {"a": i, "b": 1} for i in indices(trajectories)]


def odd_ones_fail(trajectories):
    return [ScoringFailed(f"no judge for {i}") if i % 2 else i for i in indices(trajectories)]


def short(trajectories):
    return indices(trajectories)[1:]


def number(trajectories):
    return 1.0


def raises(trajectories):
    raise KeyError("gone")


def stops(trajectories):
    return [next(iter(()))]


def own_timeout(trajectories):
    raise TimeoutError("mine")


def failing(trajectories):
    raise ScoringFailed("no judge")


async def hangs_once(trajectories, *, path):
    note(trajectories, path)
    if len(open(path).readlines()) == 1:
        await asyncio.sleep(3600)
    return indices(trajectories)


def hangs(trajectories):
    time.sleep(20)
    return indices(trajectories)
"""


@pytest.fixture
def functions(plugin):
    return plugin(FUNCTIONS)


@contextlib.asynccontextmanager
async def running(spec, **settings):
    runner = batch.make(ScoringConfig(**settings))
    scorer = runner.scorer(spec)
    try:
        await runner.start()
        yield runner, scorer
    finally:
        await runner.stop()


def score_all(spec, trajectories, **settings):
    """(results, metrics), all scored at the same time."""

    async def main():
        async with running(spec, **settings) as (runner, scorer):
            calls = (evaluate(scorer, trajectory) for trajectory in trajectories)
            return await asyncio.gather(*calls, return_exceptions=True), runner.stats.take()

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["sync", "waits"])
def test_concurrent_calls_become_full_batches_and_a_rest(functions, trajectory, tmp_path, name):
    path = tmp_path / "calls"
    spec = ScorerSpec(f"{functions}:{name}", {"path": str(path)})
    results, metrics = score_all(spec, [trajectory(index) for index in range(11)], batch_size=4)
    batches = sorted(json.loads(line) for line in path.read_text().splitlines())  # threads may write in any order
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    if name == "sync":
        assert [result.reward for result in results] == list(range(11))
    else:
        assert [result.reward for result in results] == [i if i % 2 else i + 1 for i in range(11)]
        assert results[3].turns == {0: {"t": 3.0}} and results[4].parts == {"a": 4.0, "b": 1.0}
    assert (metrics["scoring/calls"], metrics["scoring/attempts"]) == (11, 11)


def test_one_of_a_batch_may_be_left_without_a_score(functions, trajectory):
    results, _ = score_all(ScorerSpec(f"{functions}:odd_ones_fail"), [trajectory(0), trajectory(1), trajectory(2)])
    assert [getattr(result, "reward", str(result)) for result in results] == [0.0, "no judge for 1", 2.0]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("short", PluginError, "returned 2 results for 3 trajectories"),
        ("number", PluginError, "returned 1.0; it must return a list"),
        ("raises", ScoringFailed, "raises raised KeyError: 'gone'"),
        ("stops", ScoringFailed, "StopIteration"),
        ("own_timeout", ScoringFailed, "own_timeout raised TimeoutError: mine"),
        ("failing", ScoringFailed, "no judge"),
    ],
)
def test_what_is_wrong_with_a_batch_is_told_to_all_of_it_and_not_tried_again(functions, trajectory, name, kind, text):
    trajectories = [trajectory(index) for index in range(3)]
    results, metrics = score_all(ScorerSpec(f"{functions}:{name}"), trajectories)
    assert [type(result) for result in results] == [kind] * 3
    assert all(text in str(result) for result in results)
    assert metrics["scoring/retries"] == 0
    assert metrics["scoring/failures"] == (3 if kind is ScoringFailed else 0)


def test_a_batch_that_takes_too_long_is_tried_again(functions, trajectory, tmp_path):
    spec = ScorerSpec(f"{functions}:hangs_once", {"path": str(tmp_path / "calls")})
    results, metrics = score_all(spec, [trajectory(1), trajectory(2)], timeout=0.3, retries=4)
    assert [result.reward for result in results] == [1, 2]
    assert metrics["scoring/retries"] >= 2
    assert metrics["scoring/failures"] == 0


def test_a_batch_that_never_ends_is_a_failure_and_does_not_keep_us(functions, trajectory):
    results, metrics = score_all(ScorerSpec(f"{functions}:hangs"), [trajectory(1)], timeout=0.1, retries=0)
    assert isinstance(results[0], ScoringFailed)
    assert "did not score 1 trajectories within 0.1 s" in str(results[0])
    assert metrics["scoring/failures"] == 1


def test_who_stops_waiting_is_left_out_and_the_others_keep_their_results(functions, trajectory, tmp_path):
    path = tmp_path / "calls"

    async def main():
        spec = ScorerSpec(f"{functions}:sync", {"path": str(path)})
        async with running(spec) as (_, scorer):
            calls = [asyncio.ensure_future(evaluate(scorer, trajectory(index))) for index in range(3)]
            await asyncio.sleep(0)
            calls[1].cancel()
            return [(await calls[index]).reward for index in (0, 2)]

    assert asyncio.run(main()) == [0, 2]
    assert json.loads(path.read_text()) == [0, 2]


def test_stopping_leaves_nobody_waiting(functions, trajectory):
    async def main():
        runner = batch.make(ScoringConfig())
        scorer = runner.scorer(ScorerSpec(f"{functions}:sync"))
        call = asyncio.ensure_future(scorer(trajectory(1)))
        await asyncio.sleep(0)
        await runner.stop()
        await asyncio.wait((call,))
        return call.cancelled()

    assert asyncio.run(main())


def test_options_and_settings_are_checked(functions):
    runner = batch.make(ScoringConfig())
    with pytest.raises(ConfigError, match="unknown option 'pat': did you mean 'path'"):
        runner.scorer(ScorerSpec(f"{functions}:sync", {"pat": 1}))
    with pytest.raises(ConfigError, match="unknown option 'trajectories'"):
        runner.scorer(ScorerSpec(f"{functions}:sync", {"trajectories": []}))
    with pytest.raises(ConfigError, match="unknown scorer"):
        runner.scorer(ScorerSpec("gsm8"))
    with pytest.raises(PluginError, match="cannot be called"):
        runner.scorer(ScorerSpec(f"{functions}:NOT_A_FUNCTION"))
    with pytest.raises(ConfigError, match="batch_size is at least 1"):
        batch.make(ScoringConfig(batch_size=0))

"""The task swe: repositories whose tests say what they should, traces that mend them, here and at a server."""

import asyncio
import contextlib
from itertools import islice

import pytest

from turnwise.data.task_config import configure
from turnwise.errors import DataError
from turnwise.ext.sandbox.zygote_process import SandboxUnavailable
from turnwise.ext.swe.remote import SweClient
from turnwise.ext.swe.repositories import KINDS, SPLITS, problem_at, split_of
from turnwise.ext.swe.repository import read_instance, read_tests, run_tests
from turnwise.ext.swe.scoring import swe_tests
from turnwise.ext.swe.server import make_app
from turnwise.ext.swe.task import row, rows, solve
from turnwise.rollout.collector import run_group
from turnwise.rollout.prepare import open_context, prepare
from turnwise.scoring.event_loop_resources import close_loop_resources
from turnwise.types import StopReason, Trajectory


def first_of_each_kind() -> list:
    found = {}
    for index in range(400):
        problem = problem_at("test", 0, index)
        found.setdefault(problem.kind.name, problem)
    return list(found.values())


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
def test_every_kind_fails_before_the_fix_and_passes_after_it(shells, step) -> None:
    problems = first_of_each_kind()
    assert len(problems) == len(KINDS) >= 8
    problems = problems[::step]

    async def judge(pool, problem):
        made = row(problem, "test", 0, 0)
        instance = read_instance(made["extra_info"]["swe"], "")
        tests = read_tests(made["reward_model"]["ground_truth"], "")
        text = instance.files[problem.path]
        assert text.count(problem.wrong) == 1, problem.kind.name
        mended = {problem.path: text.replace(problem.wrong, problem.right)}
        return await asyncio.gather(*(run_tests(pool, instance, one, tests) for one in ({}, mended)))

    async def work():
        async with shells() as pool:
            return [await judge(pool, problem) for problem in problems]

    for problem, (before, after) in zip(problems, asyncio.run(work()), strict=True):
        assert (before.f2p_count, before.p2p_count) == (0, before.p2p_total), problem.kind.name
        assert after.resolved and after.f2p_total >= 1 and after.p2p_total >= 2, problem.kind.name


def test_train_and_test_share_no_repository_whatever_the_seed() -> None:
    def keys(split: str, seed: int) -> set[tuple[str, ...]]:
        problems = [problem_at(split, seed, index) for index in range(400)]
        assert all(split_of(one.kind, one.words) == split for one in problems)
        return {(one.kind.name, *sorted(one.words.items())) for one in problems}  # type: ignore[misc]

    assert not keys("train", 0) & keys("test", 1)
    assert list(islice(rows("train", 3), 5)) == list(islice(rows("train", 3), 5))
    assert list(islice(rows("train", 3), 5)) != list(islice(rows("train", 4), 5))
    with pytest.raises(DataError, match="did you mean 'test'"):
        next(rows("tset"))
    assert set(SPLITS) == {"train", "test"}


def play(*overrides: str, options: dict | None = None) -> list[tuple[Trajectory, object]]:
    config = configure("task=swe", "sandbox.memory_mb=128", *overrides)
    prepared = prepare(config, "test", limit=2)

    async def work():
        async with open_context(prepared, solve(config.seed)) as context:
            groups = await asyncio.gather(*(run_group(s, [0], step=0, context=context) for s in prepared.samples))
        found = [group.trajectories[0] for group in groups]
        try:
            return [(one, await swe_tests(one, memory_mb=128, **(options or {}))) for one in found]
        finally:
            await close_loop_resources()

    return asyncio.run(work())


def check_solved(played) -> None:
    assert len(played) == 2
    for trajectory, score in played:
        assert trajectory.failure is None and trajectory.stop_reason is StopReason.ANSWERED
        assert [record.call.name for record in trajectory.calls] == ["edit", "edit", "bash", "finish"]
        assert "OK" in trajectory.turns[2].replies[0].text
        assert trajectory.render_check is not None and trajectory.render_check.exact
        assert score.reward == 1.0
        assert score.parts["f2p"] == score.parts["p2p"] == score.parts["finished"] == score.parts["acc"] == 1.0
        assert 1 <= score.parts["patch_lines"] <= 5


def test_traces_that_mend_the_repository_are_worth_1(shells) -> None:
    check_solved(play())


def test_the_same_task_at_a_server(shells, serving_in_a_thread, monkeypatch) -> None:
    monkeypatch.setenv("TURNWISE_SANDBOX_TOKEN", "a-token-for-tests")

    @contextlib.asynccontextmanager
    async def open_app():
        async with shells() as made:
            yield make_app(made, "a-token-for-tests")

    with serving_in_a_thread(open_app) as url:
        check_solved(play(f"swe.url={url}", options={"url": url}))


def test_an_unreachable_server_is_no_reward() -> None:
    async def work():
        async with SweClient("http://127.0.0.1:9", retries=0):
            raise AssertionError("there is no server")

    with pytest.raises(SandboxUnavailable, match="no sandbox server"):
        asyncio.run(work())

"""The bundled task: problems that are right, splits that share nothing, and traces that err on purpose."""

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest

from turnwise.data.loader import load_samples
from turnwise.data.task_config import configure
from turnwise.data.tasks.arithmetic import FAMILIES, problem_at, rows, script, split_of, value, write_out
from turnwise.data.tasks.arithmetic import prepare as prepare_files
from turnwise.errors import DataError
from turnwise.rollout.collector import run_group
from turnwise.rollout.prepare import open_context, prepare
from turnwise.rollout.tools.calculate import evaluate
from turnwise.scoring.rules.gsm8k import gsm8k
from turnwise.types import CallStatus, Trajectory


def test_every_answer_is_what_the_expression_gives() -> None:
    seen = Counter[str]()
    for index in range(600):
        problem = problem_at("train", 3, index)
        written = write_out(problem.family.right, problem.numbers)
        assert evaluate(written) == str(problem.answer)
        assert all(str(number) in problem.question or number == 2 for number in problem.numbers.values())
        assert 1 <= problem.answer <= 9999
        seen[problem.family.name] += 1
    assert set(seen) == {family.name for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_steps_lead_to_the_answer_and_wrong_expressions_lead_elsewhere(family) -> None:  # type: ignore[no-untyped-def]
    problems = [p for p in (problem_at("train", 0, i) for i in range(1500)) if p.family is family]
    for problem in problems:
        previous = ""
        for step in family.steps:
            previous = evaluate(write_out(step, problem.numbers).replace("_", previous))
        assert previous == str(problem.answer)
    for wrong in family.wrong:
        off = sum(value(wrong, p.numbers) != p.answer for p in problems)
        assert off >= 0.9 * len(problems), f"{wrong} is too often right"


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1), (7, 123)])
def test_train_and_test_share_no_problem_whatever_the_seed(seeds: tuple[int, int]) -> None:
    def keys(split: str, seed: int) -> set[tuple[str, tuple[tuple[str, int], ...]]]:
        problems = [problem_at(split, seed, index) for index in range(500)]
        assert all(split_of(p.family, p.numbers) == split for p in problems)
        return {(p.family.name, tuple(sorted(p.numbers.items()))) for p in problems}

    assert not keys("train", seeds[0]) & keys("test", seeds[1])


def test_rows_are_reproducible_and_differ_by_seed() -> None:
    first = list(itertools.islice(rows("test", 1), 20))
    assert first == list(itertools.islice(rows("test", 1), 20))
    assert first != list(itertools.islice(rows("test", 2), 20))
    with pytest.raises(DataError, match="did you mean 'test'"):
        next(rows("tset", 1))


def test_prepared_files_hold_the_same_problems(tmp_path: Path) -> None:
    written = prepare_files(tmp_path)
    (sample, *_) = load_samples([tmp_path / "test.parquet"], prompt_key="prompt")
    assert sample.prompt[-1].text == problem_at("test", 0, 0).question
    assert sorted(written.values()) == [500, 4000]


def test_scripted_traces_err_systematically_and_recover_from_broken_calls() -> None:
    config = configure("rollout.tools=[calculate]", "rollout.interaction=null")
    prepared = prepare(config, "train", limit=400)

    async def play() -> list[Trajectory]:
        async with open_context(prepared, script(config.seed)) as context:
            groups = [await run_group(sample, [0], step=0, context=context) for sample in prepared.samples]
        return [group.trajectories[0] for group in groups]

    trajectories = asyncio.run(play())
    assert all(t.render_check is not None and t.render_check.exact for t in trajectories)
    right = sum(asyncio.run(gsm8k(t)).reward == 1.0 for t in trajectories)
    assert 0.3 * len(trajectories) < right < 0.55 * len(trajectories)
    statuses = Counter(call.status for t in trajectories for call in t.calls)
    assert statuses[CallStatus.OK] > 10 * statuses[CallStatus.ERROR] > 0
    assert statuses[CallStatus.MALFORMED] > 0
    for trajectory in trajectories:
        if trajectory.calls and trajectory.calls[0].status is not CallStatus.OK:
            assert trajectory.calls[-1].status is CallStatus.OK, "a broken call is repaired"

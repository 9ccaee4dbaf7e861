"""The spread of rewards by step is what numpy says of each step's rewards."""

import json

import numpy as np
import pytest

from turnwise.ext.board import steps as by_step
from turnwise.ext.board.reward_spread import spread
from turnwise.ext.board.table import Table
from turnwise.storage.index import record

DRAW = np.random.default_rng(0)
REWARDS = {step: DRAW.normal(size=5 + step).round(3).tolist() for step in (3, 4, 9)}


@pytest.fixture
def table(run_dir, make):
    for step, rewards in REWARDS.items():
        made = [
            make(f"s{row}", step=step, reward=reward, parts={"acc": abs(reward)} | ({"late": 1.0} if step > 3 else {}))
            for row, reward in enumerate(rewards)
        ]
        unscored = make("unscored", step=step, reward=None)
        record(run_dir, f"trajectories/step_{step:06d}.parquet", [*made, unscored])
    record(run_dir, "trajectories/step_000010.parquet", [make("x", step=10, reward=None)])
    record(run_dir, "eval/step_000009.parquet", [make("e", step=-1, reward=100.0)])
    found = Table(run_dir)
    found.refresh(None)
    return found


def test_every_number_is_of_the_scored_trajectories_of_its_step(table):
    found = spread(table)["series"]
    assert set(found) == {"reward", "part/acc", "part/late"}
    reward = found["reward"]
    assert reward["step"] == [3, 4, 9], "nothing was scored in step 10"
    assert reward["n"] == [len(rewards) for rewards in REWARDS.values()]
    for name, function in {
        "mean": np.mean,
        "std": np.std,
        "p10": lambda values: np.quantile(values, 0.1),
        "p90": lambda values: np.quantile(values, 0.9),
    }.items():
        assert reward[name] == pytest.approx([float(function(rewards)) for rewards in REWARDS.values()], rel=1e-5), name
    assert found["part/acc"]["mean"][0] == pytest.approx(np.abs(REWARDS[3]).mean(), rel=1e-5)


def test_a_deviation_never_leaves_what_was_seen(table):
    reward = spread(table)["series"]["reward"]
    for at, rewards in enumerate(REWARDS.values()):
        low, high = np.mean(rewards) - np.std(rewards), np.mean(rewards) + np.std(rewards)
        assert reward["std_low"][at] == pytest.approx(max(low, min(rewards)), rel=1e-4)
        assert reward["std_high"][at] == pytest.approx(min(high, max(rewards)), rel=1e-4)
    parts = spread(table)["series"]["part/late"]
    assert parts["std_low"] == parts["std_high"] == [1.0, 1.0]


def test_a_part_is_shown_from_the_step_that_has_it(table):
    late = spread(table)["series"]["part/late"]
    assert late["step"] == [4, 9] and late["mean"] == [1.0, 1.0] and late["std"] == [0.0, 0.0]


def test_a_long_run_is_thinned_and_no_trajectory_is_lost(table, monkeypatch):
    monkeypatch.setattr(by_step, "MOST_POINTS", 2)
    reward = spread(table)["series"]["reward"]
    assert len(reward["step"]) == 2 and sum(reward["n"]) == sum(len(rewards) for rewards in REWARDS.values())
    assert reward["mean"][0] == pytest.approx(np.mean(REWARDS[3] + REWARDS[4]), rel=1e-5)
    assert set(reward["step"]) <= {3, 4, 9, 10}


def test_an_empty_run_has_no_series(run_dir):
    empty = Table(run_dir)
    empty.refresh(None)
    assert json.dumps(spread(empty)) == '{"series": {}}'

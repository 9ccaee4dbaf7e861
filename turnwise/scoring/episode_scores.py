"""Rewards that were given while the episode ran: by its environment or its simulated user."""

import math
import numbers
from typing import Any

from turnwise.errors import ScoringFailed
from turnwise.scoring.client_options import client_options
from turnwise.scoring.scorer import Score
from turnwise.types import Trajectory


@client_options("unfinished", "right")
async def environment(trajectory: Trajectory, *, unfinished: float = 0.0, right: float = 1.0) -> Score:
    """What the episode's environment gave; `unfinished` where a budget ended the episode before it said anything.

    `right` is the reward from which on the episode counts as right. Parts: `acc`, and `finished`.
    """
    record = trajectory.facts.environment
    if record is None:
        raise ScoringFailed("the episode had no environment: the scorer `environment` is for http_env and gym_env")
    reward = finite(record.reward)
    if reward is None and record.finished:
        raise ScoringFailed("the environment finished the episode without a reward")
    acc = float(reward is not None and reward >= right)
    return Score(unfinished if reward is None else reward, {"acc": acc, "finished": float(record.finished)})


async def interaction(trajectory: Trajectory) -> float:
    """What the simulated user thought of the whole episode."""
    score = finite(trajectory.facts.user_score)
    if score is None:
        raise ScoringFailed("the simulated user gave no score")
    return score


def finite(value: Any) -> float | None:
    """A value that somebody left on the trajectory, when it is a number that can be a reward."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    return float(value)

"""Rewards that were given while the episode ran: by its environment, its simulated user or its agent loop."""

import math
import numbers
from typing import Any

from turnwise.errors import ScoringFailed
from turnwise.scoring.client_options import client_options
from turnwise.scoring.scorer import Score
from turnwise.types import Trajectory

ENVIRONMENT = "environment"
"""The artifact that has what an environment said: `reward`, `finished`, `metrics`, and `left_open` when it failed to
close."""
INTERACTION = "interaction_score"
VERL_LOOP = "verl"
"""The artifact that has what an agent loop of verl's returned beside tokens."""


@client_options("unfinished", "right")
async def environment(trajectory: Trajectory, *, unfinished: float = 0.0, right: float = 1.0) -> Score:
    """What the episode's environment gave; `unfinished` where a budget ended the episode before it said anything.

    `right` is the reward from which on the episode counts as right. Parts: `acc`, and `finished`.
    """
    kept = trajectory.artifacts.get(ENVIRONMENT)
    if not isinstance(kept, dict):
        raise ScoringFailed("the episode had no environment: the scorer `environment` is for http_env and gym_env")
    given = _number(kept.get("reward"))
    finished = kept.get("finished") is True
    if given is None and finished:
        raise ScoringFailed("the environment finished the episode without a reward")
    reward = unfinished if given is None else given
    return Score(reward, {"acc": float(given is not None and reward >= right), "finished": float(finished)})


async def interaction(trajectory: Trajectory) -> float:
    """What the simulated user thought of the whole episode."""
    given = _number(trajectory.artifacts.get(INTERACTION))
    if given is None:
        raise ScoringFailed("the simulated user gave no score")
    return given


async def loop_reward(trajectory: Trajectory) -> float:
    """The `reward_score` that an agent loop of verl's returned with its tokens."""
    kept = trajectory.artifacts.get(VERL_LOOP)
    given = _number(kept.get("reward_score")) if isinstance(kept, dict) else None
    if given is None:
        raise ScoringFailed("the agent loop returned no reward_score")
    return given


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    return float(value)

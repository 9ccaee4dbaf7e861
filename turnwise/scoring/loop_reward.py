"""The `loop_reward` scorer: the reward that an agent loop of verl's returned with its episode."""

from turnwise.errors import ScoringFailed
from turnwise.types import Trajectory

ARTIFACT = "verl"
"""Where rollout/verl_loops.py leaves it."""


async def loop_reward(trajectory: Trajectory) -> float:
    """`reward_score` of the loop's output."""
    score = trajectory.artifacts.get(ARTIFACT, {}).get("reward_score")
    if score is None:
        raise ScoringFailed("the agent loop returned no reward_score")
    return float(score)

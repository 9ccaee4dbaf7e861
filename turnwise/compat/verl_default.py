"""The built-in scorer `verl_default`: verl's own rule for a data source, over the last answer."""

from typing import Any

from turnwise.compat.verl.reward_score import default_compute_score
from turnwise.scoring.scorer import solution_of, verl_result
from turnwise.scoring.sources import VERL
from turnwise.types import Trajectory


async def verl_default(trajectory: Trajectory) -> Any:
    """What verl's `default_compute_score` gives: 1 or -1 for math_dapo and aime, geometry3k's with its format."""
    sample = trajectory.sample
    return verl_result(default_compute_score(sample.data_source, solution_of(trajectory), sample.ground_truth), VERL)

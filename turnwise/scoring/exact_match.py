"""The `exact_match` scorer: the last answer is the ground truth, character by character."""

from turnwise.errors import DataError
from turnwise.types import Trajectory


async def exact_match(trajectory: Trajectory) -> float:
    """1 when the last assistant message, reasoning and calls left out, equals the ground truth; outer space is free."""
    truth = trajectory.sample.ground_truth
    if not isinstance(truth, str | int) or isinstance(truth, bool):
        raise DataError(f"sample {trajectory.sample.id!r}: exact_match needs a text as ground truth, not {truth!r:.80}")
    return float(bool(trajectory.answers) and trajectory.answers[-1].visible.strip() == str(truth).strip())

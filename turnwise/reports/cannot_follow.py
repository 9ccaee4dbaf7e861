"""Of an evaluation in which nothing is right: whether the model cannot follow the task at all, and what to do then."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from turnwise.rollout.toolbox.report import LONGEST_ERROR
from turnwise.scoring.scorer import is_failed
from turnwise.storage.transcript import visible
from turnwise.types import CallStatus, StopReason, Trajectory

NEARLY_ALL = 0.9
_CUT = (StopReason.TURN_TRUNCATED, StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL)
_STRANGE = (CallStatus.UNKNOWN_TOOL, CallStatus.MALFORMED)


def cannot_follow(trajectories: Sequence[Trajectory], run: Path) -> str | None:
    """A sentence where nearly all answers are cut off, or nearly all calls are of no tool that there is."""
    played = [trajectory for trajectory in trajectories if not is_failed(trajectory)]
    if not played or any(trajectory.right for trajectory in played):
        return None
    calls = [record for trajectory in played for record in trajectory.every_call]
    strange = [record for record in calls if record.status in _STRANGE]
    cut = sum(trajectory.stop_reason in _CUT for trajectory in played)
    if cut >= NEARLY_ALL * len(played):
        sign = f"{cut} of {len(played)} episodes end in words that a limit cuts off"
    elif calls and len(strange) >= NEARLY_ALL * len(calls):
        name = Counter(record.call.name for record in strange).most_common(1)[0][0]
        what = f"such as {visible(name[:LONGEST_ERROR])!r}" if name else "and cannot be read"
        sign = f"{len(strange)} of {len(calls)} calls are of no tool that there is, {what}"
    else:
        return None
    return (
        f"the model does not follow this task: {sign}, and nothing is right. Look at one (`turnwise show {run}`), then "
        "take a model that can (model.path, docs/models.md), or teach this one first (`turnwise sft`)"
    )

"""What happens between scoring and baselines: the over-long penalty and the count of failures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.errors import ConfigError, TurnwiseError
from turnwise.rollout.collector import usable
from turnwise.scoring.failures import scoring_failed
from turnwise.training.sequences import LEFT_OUT, TrainSequence
from turnwise.types import Group


def overlong_penalty(tokens: int, *, limit: int, buffer: int, factor: float = 1.0) -> float:
    """0 up to `limit - buffer` tokens, falling linearly to -factor at the limit and no further."""
    if not 0 < buffer <= limit:
        raise ConfigError(f"the over-long buffer must lie between 1 and the limit of {limit} tokens, not {buffer}")
    if factor < 0:
        raise ConfigError(f"the over-long factor cannot be negative: {factor}")
    excess = min(max(tokens - (limit - buffer), 0), buffer)
    return -factor * excess / buffer if excess else 0.0


def shape_overlong(
    sequences: Sequence[TrainSequence], *, limit: int, buffer: int, factor: float = 1.0
) -> dict[str, float]:
    """Lower the reward of trajectories close to the limit; returns metrics.

    Length counts what `rollout.max_tokens` counts, everything after the first prompt; replies that a rewritten history
    folded into the prompt of a later segment are not seen. The recorded trajectory keeps the scorer's reward; only the
    sequences change, so call it once, before `assign`.
    """
    lengths: dict[int, int] = {}
    for sequence in sequences:
        if sequence.group != LEFT_OUT:
            written = len(sequence.token_ids) - int(sequence.policy[0])
            lengths[sequence.trajectory] = lengths.get(sequence.trajectory, 0) + written
    penalties = {
        number: overlong_penalty(length, limit=limit, buffer=buffer, factor=factor)
        for number, length in lengths.items()
    }
    for sequence in sequences:
        sequence.reward += penalties.get(sequence.trajectory, 0.0)
    count = max(1, len(penalties))
    return {
        "overlong/penalty_mean": sum(penalties.values()) / count,
        "overlong/fraction": sum(penalty < 0 for penalty in penalties.values()) / count,
    }


@dataclass(frozen=True, slots=True)
class GroupStats:
    """What became of a step's groups: `GroupStats(groups=8, trajectories=32, failed=1, all_failed=0, ...)`."""

    groups: int
    trajectories: int
    failed: int
    """Trajectories left out because of a failure."""
    all_failed: int
    """Groups without a usable trajectory."""
    single: int
    """Groups with one usable trajectory: nothing to compare it with."""
    flat: int
    """Groups whose usable trajectories, two or more, all have the same reward."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why episodes failed. One that went well and could not be scored is another matter: `scoring.max_failures`."""

    def metrics(self) -> dict[str, float]:
        """The step's counts of groups and trajectories as metrics."""
        return {
            "groups/total": float(self.groups),
            "groups/all_failed": float(self.all_failed),
            "groups/single": float(self.single),
            "groups/flat": float(self.flat),
            "trajectories/total": float(self.trajectories),
            "trajectories/failed": float(self.failed),
        }

    def stop_if_failing(self, limit: float) -> None:
        """Stop the run when more than this share of the step's episodes failed, and say why they did."""
        if not 0.0 <= limit <= 1.0:
            raise ConfigError(f"the tolerated share of failed episodes must lie between 0 and 1, not {limit}")
        failed = sum(self.reasons.values())
        if failed > limit * self.trajectories:
            commonest, count = self.reasons.most_common(1)[0]
            raise TurnwiseError(
                f"{failed} of {self.trajectories} episodes failed (rollout.max_failures={limit:g}); "
                f"most often ({count}): {commonest}"
            )


def count(groups: Sequence[Group]) -> GroupStats:
    """Count failures and groups that teach a group baseline nothing."""
    rewards = [[trajectory.reward for trajectory in usable(group)] for group in groups]
    total = sum(len(group.trajectories) for group in groups)
    return GroupStats(
        groups=len(groups),
        trajectories=total,
        failed=total - sum(len(group_rewards) for group_rewards in rewards),
        all_failed=sum(not group_rewards for group_rewards in rewards),
        single=sum(len(group_rewards) == 1 for group_rewards in rewards),
        flat=sum(len(group_rewards) > 1 and len(set(group_rewards)) == 1 for group_rewards in rewards),
        reasons=Counter(t.failure for g in groups for t in g.trajectories if t.failure and not scoring_failed(t)),
    )

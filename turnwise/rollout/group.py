"""Sibling episodes of one sample: the unit of scheduling and of the baseline."""

from turnwise.concurrency import gather_all
from turnwise.rollout.episode import RolloutContext, run_episode
from turnwise.types import Group, Sample


async def run_group(sample: Sample, *, size: int, step: int, context: RolloutContext) -> Group:
    """`size` independent episodes of one sample, side by side; a bug in one cancels the others and is raised."""
    siblings = (run_episode(sample, sibling=number, step=step, context=context) for number in range(size))
    return Group(sample, await gather_all(siblings))

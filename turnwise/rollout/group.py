"""Sibling episodes of one sample: the unit of scheduling and of the baseline."""

from turnwise.rollout.episode import Stage, run_episode
from turnwise.together import together
from turnwise.types import Group, Sample


async def run_group(sample: Sample, *, size: int, step: int, stage: Stage) -> Group:
    """`size` independent episodes of one sample, side by side; a bug in one cancels the others and is raised."""
    siblings = (run_episode(sample, sibling=number, step=step, stage=stage) for number in range(size))
    return Group(sample, await together(siblings))

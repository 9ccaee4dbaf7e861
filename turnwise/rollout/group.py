"""Sibling episodes of one sample: the unit of scheduling and of the baseline."""

import asyncio

from turnwise.rollout.episode import Stage, run_episode
from turnwise.types import Group, Sample


async def run_group(sample: Sample, *, size: int, step: int, stage: Stage) -> Group:
    """`size` independent episodes of one sample, side by side; a bug in one cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            siblings = [
                tasks.create_task(run_episode(sample, sibling=number, step=step, stage=stage)) for number in range(size)
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors  # one message for a person, not a group of them
    return Group(sample, [task.result() for task in siblings])

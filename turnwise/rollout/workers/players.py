"""A run's episodes, played by its episode workers: when they are opened, what they refuse, and groups as they come."""

import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from turnwise import extensions
from turnwise.config import ONE_MACHINE, Config, SamplingConfig
from turnwise.data.task import known_scorers
from turnwise.engines.devices import MOST_WORKERS, episode_workers
from turnwise.engines.samplers.sampler import Sampler
from turnwise.errors import ConfigError
from turnwise.rollout.episode import RolloutContext
from turnwise.rollout.placement import placement_of
from turnwise.rollout.prepare import Prepared, sample_per_route
from turnwise.scoring.event_loop_resources import report_counts
from turnwise.scoring.runners.inline import InlineRunner
from turnwise.scoring.scorer import apply_all
from turnwise.scoring.service import spec_for
from turnwise.storage import underway
from turnwise.types import Group, Sample

if TYPE_CHECKING:
    from turnwise.rollout.workers.pool import PlayUnderWay, WorkerPool


class WorkerPlayers:
    """Implements `episode.Players`: groups of one split, drawn one way, played and scored by the pool's workers."""

    def __init__(self, pool: "WorkerPool", prepared: Prepared, sampling: SamplingConfig) -> None:
        self._pool, self._prepared, self._scoring = pool, prepared, prepared.scoring
        self._scored = {source: scored_by_workers(prepared, source) for source in prepared.scoring.scorers}
        self._split, self._sampling = prepared.split, sampling
        self._plays: dict[int, PlayUnderWay] = {}
        """Of groups that are not finished, by their id."""

    async def play(self, sample: Sample, siblings: Sequence[int], step: int) -> Group:
        """A group whose episodes have ended; `finish` brings them."""
        from turnwise.rollout.workers.messages import Drawn

        drawn = Drawn(self._split, self._sampling, self._scored[sample.data_source])
        play = await self._pool.play(sample, self._prompt(sample), siblings, step, drawn)
        group = Group(sample, [])
        self._plays[id(group)] = play
        return group

    def _prompt(self, sample: Sample) -> Sequence[int] | None:
        """The check of its length has rendered it."""
        if (renderer := self._prepared.renderer) is None:
            return None
        tools = self._prepared.toolbox.schemas(self._prepared.plan.route(sample).tools)
        return renderer.prompt_known(sample.prompt, tools)

    async def finish(self, group: Group) -> None:
        """Its trajectories, scored."""
        finished = await self._pool.finish(self._plays.pop(id(group)))
        self._scoring.runner.stats.add(finished.scoring)
        report_counts(finished.counts)
        for trajectory in finished.trajectories:
            if trajectory.sample == group.sample:  # one object instead of a copy of each
                trajectory.sample = group.sample
            group.trajectories.append(trajectory)
            with underway.playing(trajectory.sample, trajectory.sibling, trajectory.step, ()) as ended:
                ended.append(trajectory)
        if not self._scored[group.sample.data_source]:
            await apply_all(self._scoring.scorers[group.sample.data_source], group.trajectories)


def scored_by_workers(prepared: Prepared, source: str) -> bool:
    """Whether the scorer of a data source runs where the episodes are played.

    What an extension brings stays with the run: judges and sandboxes have budgets and sessions that all episodes share.
    """
    if not isinstance(prepared.scoring.runner, InlineRunner) or "scorer" in prepared.of_caller:
        return False
    return spec_for(source, prepared.config.scoring.scorers, known_scorers()) not in extensions.named("scorers")


OBJECTS = ("tools", "interaction")
"""What other processes cannot have when it comes as Python objects."""


def workers_of(prepared: Prepared) -> int:
    """How many processes play the episodes of a run: what its config says, or else what suits it."""
    said = prepared.config.rollout.workers
    return episode_workers(prepared.config) if said is not None or not kept_here(prepared) else 0


def kept_here(prepared: Prepared) -> str | None:
    """Why a run whose config does not say a number of workers can have none."""
    if objects := [name for name in prepared.of_caller if name in OBJECTS]:
        return f"{' and '.join(objects)} came as Python objects, which other processes do not have"
    narrow = [tool for tool in prepared.toolbox.shared() if tool.concurrency < MOST_WORKERS]
    return f"the tool {narrow[0].name} takes {narrow[0].concurrency} call(s) at once in all" if narrow else None


def workers_line(prepared: Prepared) -> str | None:
    """What the plan says of them; nothing where the engine has the cores."""
    config, workers = prepared.config, workers_of(prepared)
    if workers:
        chosen = "" if config.rollout.workers is not None else " (rollout.workers=null)"
        return f"{workers} processes play the episodes{chosen}, with tools, users and scorers of their own"
    if config.rollout.workers is None and episode_workers(config):
        return f"none: {kept_here(prepared)}"
    return None


def check_workers(prepared: Prepared) -> None:
    """ConfigError for a run that several processes cannot play."""
    workers, key = workers_of(prepared), "rollout.workers"
    if not workers:
        return
    if objects := [name for name in prepared.of_caller if name in OBJECTS]:
        raise ConfigError(
            f"{key}={workers}: {' and '.join(objects)} were given as Python objects, and other processes need names: "
            f"set them in the config as file.py:name, or {key}=0"
        )
    for tool in prepared.toolbox.shared():
        if tool.concurrency < workers:
            raise ConfigError(
                f"{key}={workers}: the tool {tool.name} takes {tool.concurrency} call(s) at once in all: as many "
                "workers at most can share it"
            )


@asynccontextmanager
async def open_workers(
    config: Config, prepared: Sequence[Prepared], sampler: Sampler | None, say: Callable[[str], None]
) -> AsyncIterator["WorkerPool | None"]:
    """The run's episode workers, ended on every path; None where episodes are played in this process."""
    if not (workers := workers_of(prepared[0])):
        yield None
        return
    from turnwise.rollout.workers.messages import SamplerTraits, Setup
    from turnwise.rollout.workers.pool import WorkerPool

    # An endpoint and a script cost no memory: each worker opens its own.
    asked = bool(extensions.engine(config.engine.name).device)
    facts = SamplerTraits(sampler.context_length, sampler.capabilities) if asked and sampler is not None else None
    setup = Setup(
        list(sys.path),
        dataclasses.replace(config, cluster=ONE_MACHINE, rollout=dataclasses.replace(config.rollout, workers=0)),
        workers,
        {each.split: list(sample_per_route(each).values()) for each in prepared},
        facts,
        underway.looked_on(),
    )
    images = [each.renderer.images for each in prepared if each.renderer is not None and each.renderer.images]
    adopt = images[0].adopt if images else None
    pool = WorkerPool(setup, placement_of(config).worker_hosts(sampler if asked else None, adopt), say)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def played_by(pool: "WorkerPool | None", context: RolloutContext, prepared: Prepared) -> RolloutContext:
    """The context, whose groups the workers play where there are any."""
    if pool is None:
        return context
    return dataclasses.replace(context, players=WorkerPlayers(pool, prepared, context.config.sampling))

"""Many groups at once, handed out in the order they were started: the bounded collector, and the groups of a step."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from turnwise.config import SamplingConfig
from turnwise.config.choices import Advantage
from turnwise.engines.devices import choose as choose_devices
from turnwise.errors import DataError
from turnwise.rollout.episode import RolloutContext, run_episode
from turnwise.rollout.plugin_calls import to_the_end
from turnwise.rollout.prepare import Prepared
from turnwise.scoring.scorer import apply_all
from turnwise.scoring.service import Scoring
from turnwise.system.concurrency import gather_all, rare_cycle_searches
from turnwise.types import Group, Sample, Trajectory

if TYPE_CHECKING:
    from turnwise.data.loader import Loader

T = TypeVar("T")
"""What a group is played from: a sample, or a sample with what belongs to it."""

RunGroup = Callable[[T], Awaitable[Group]]
ScoreGroup = Callable[[Group], Awaitable[None]]

MOST_DRAWS = 3
"""Times `training.groups` samples that a step may draw until enough groups differ in reward."""


async def run_group(sample: Sample, siblings: Sequence[int], *, step: int, context: RolloutContext) -> Group:
    """Independent episodes of one sample, side by side; a bug in one cancels the others and is raised.

    Where other processes play, the group is empty until it is scored.
    """
    if context.players is not None:
        return await context.players.play(sample, siblings, step)
    episodes = (run_episode(sample, sibling=number, step=step, context=context) for number in siblings)
    return Group(sample, await gather_all(episodes))


async def score_group(group: Group, scoring: Scoring, context: RolloutContext) -> None:
    """Score the trajectories, wherever they were played."""
    if context.players is not None:
        await context.players.finish(group)
    else:
        await apply_all(scoring.scorers[group.sample.data_source], group.trajectories)


class Collector(Generic[T]):
    """produces: groups in start order. waits for: the oldest group. unblocked by: any group that finishes or fails.

    `ahead` bounds the groups started and not yet handed out, `running` those being played and also those being scored;
    a played group at once makes room for the next, so that a slow judge does not leave the engine idle. Start order
    matters: handing out whatever finishes first would crowd out long episodes.
    """

    def __init__(
        self, samples: Iterable[T], run: RunGroup[T], *, running: int, ahead: int, score: ScoreGroup | None = None
    ) -> None:
        if running < 1 or ahead < 1:
            raise ValueError("running and ahead must be at least 1")
        self._items: Iterator[T] = iter(samples)
        self._run, self._score = run, score
        self._scoring = asyncio.Semaphore(running)
        self._running, self._ahead = running, ahead
        self._started: deque[asyncio.Task[Group]] = deque()
        self._ready: list[Group] = []
        """Taken from `_started` for a call of `next_groups` that was cancelled before it had all it asked for."""
        self._busy = 0
        self._searches = rare_cycle_searches()
        self._closed = False
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._searches.__enter__()
        self.fill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for task in self._started:
            task.cancel()
        try:
            await to_the_end(_settled(self._started))
        finally:
            self._started.clear()
            self._ready.clear()
            self._searches.__exit__(None, None, None)

    async def next_groups(self, count: int) -> list[Group]:
        """The next `count` groups, fewer at the end of the samples, none when all were handed out.

        The first failure of any group is raised as soon as there is nothing finished to hand out before it.
        """
        while len(self._ready) < count and await self._oldest_is_done():
            self._ready.append(self._started.popleft().result())
            self.fill()
        groups, self._ready = self._ready[:count], self._ready[count:]
        return groups

    @property
    def finished(self) -> int:
        """Groups that are done and not handed out."""
        return len(self._ready) + sum(task.done() for task in self._started)

    def unfinished(self, count: int) -> int:
        """How many of the next `count` groups would have to be waited for now."""
        first = islice(self._started, max(0, count - len(self._ready)))
        return max(0, count - len(self._ready) - sum(task.done() for task in first))

    async def _oldest_is_done(self) -> bool:
        """Wait for the oldest group; False when there is none."""
        if self._started and not self._started[0].done():
            failed = asyncio.ensure_future(self._failed.wait())
            try:
                await asyncio.wait((self._started[0], failed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                failed.cancel()
        oldest = self._started[0] if self._started else None
        good = oldest is not None and oldest.done() and not oldest.cancelled() and oldest.exception() is None
        if self._failure is not None and not good:
            raise self._failure
        return oldest is not None

    def fill(self) -> None:
        """Start what the bounds allow; to be called when samples that had ended go on."""
        while not self._closed and self._failure is None:
            if self._busy >= self._running or len(self._started) >= self._ahead:
                return
            try:
                sample = next(self._items, None)
            except Exception as error:  # raised to whoever waits, after what was started before
                self._fail(error)
                return
            if sample is None:
                return
            self._busy += 1
            self._started.append(asyncio.ensure_future(self._collect(sample)))

    async def _collect(self, sample: T) -> Group:
        """One group. It makes room for the next before it is done, so that `next_groups` never finds a gap."""
        try:
            try:
                group = await self._run(sample)
            finally:
                self._busy -= 1
            self.fill()
            if self._score is not None:
                async with self._scoring:
                    await self._score(group)
            return group
        except asyncio.CancelledError:
            self._fail(RuntimeError("a group was cancelled from elsewhere"))
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self._failure is None and not self._closed:
            self._failure = error
            self._failed.set()


async def _settled(tasks: Iterable[asyncio.Task[Group]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


# --- the groups of a training step ---------------------------------------------------------------------------


class Policy(Protocol):
    """Who plays the episodes of a training: its engines, whose weights have a version."""

    version: int

    def context(self, prepared: Prepared, sampling: SamplingConfig) -> RolloutContext: ...


class SampleStream:
    """The samples in the loader's order, as far as collection may run ahead. A gate: it yields again once widened."""

    def __init__(self, loader: "Loader", first_batch: int, batches_allowed: int) -> None:
        self._loader = loader
        self._batch = first_batch
        self._allowed = batches_allowed
        self._waiting: list[Sample] = []

    def __iter__(self) -> "SampleStream":
        return self

    def __next__(self) -> tuple[int, Sample]:
        """(the batch it was drawn in, which is part of its noise; the sample)."""
        if not self._waiting:
            if self._batch >= self._allowed:
                raise StopIteration
            self._waiting = list(next(self._loader))
            self._batch += 1
        return self._batch - 1, self._waiting.pop(0)

    def allow(self, prompt_batches: int) -> None:
        """Let collection run up to this many batches of prompts in all."""
        self._allowed = prompt_batches


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of one step, and how many batches of prompts they took."""

    groups: list[Group]
    baselines: dict[int, float | None]
    """remax: the greedy reward by index of the group."""
    prompt_batches: int
    metrics: dict[str, float]
    """How collecting and scoring went meanwhile."""


class Groups:
    """Rolls out the stream and hands a step its groups. `allow` is called when new weights have been published."""

    def __init__(self, engines: Policy, prepared: Prepared, loader: "Loader", first_batch: int) -> None:
        self._config, self._scoring, self._engines = prepared.config, prepared.scoring, engines
        self._context = engines.context(prepared, self._config.sampling)
        wanted = self._config.algorithm.advantage == Advantage.remax
        self._greedy = engines.context(prepared, replace(self._config.sampling, temperature=0.0)) if wanted else None
        self._alone: dict[int, Group] = {}
        """remax: the greedy rollout of a group, by its id."""
        self._stream = SampleStream(loader, first_batch, first_batch + 1 + self._config.training.max_lag)
        running = max(1, choose_devices(self._config).episodes // self._config.training.group_size)
        self.collector: Collector[tuple[int, Sample]] = Collector(
            self._stream, self._run, running=running, ahead=1 << 30, score=self._score
        )

    def allow(self, prompt_batches: int) -> None:
        """Let collection run up to this many batches of prompts in all, `max_lag` ahead of them included."""
        self._stream.allow(prompt_batches + 1 + self._config.training.max_lag)
        self.collector.fill()

    async def next_step(self, first_batch: int) -> Collected:
        """The next step's groups; with dynamic sampling, batches are drawn until enough groups differ in reward.

        A step waits for its groups, however long their episodes take: nothing is left out for being slow.
        """
        training, collector = self._config.training, self.collector
        most = MOST_DRAWS if training.drop_constant_groups else 1
        waited, drawn, stale = collector.unfinished(training.groups), 0, 0
        usable_groups: list[Group] = []
        alone: dict[int, Group | None] = {}
        for prompt_batches in range(1, most + 1):
            groups = await collector.next_groups(training.groups)
            alone |= {id(group): self._alone.pop(id(group), None) for group in groups}
            drawn, stale = drawn + len(groups), stale + leave_out_stale(groups, self._engines.version, training.max_lag)
            usable_groups += keep_varied(groups).kept if training.drop_constant_groups else groups
            if len(usable_groups) >= training.groups:
                break
            if prompt_batches < most:
                self.allow(first_batch + prompt_batches)
        chosen = usable_groups[: training.groups]
        greedy = [alone[id(group)] for group in chosen]
        baselines = {n: None if played is None else played.trajectories[0].reward for n, played in enumerate(greedy)}
        counted = {"waited_for": waited, "ahead": collector.finished, "drawn": drawn, "left_out": drawn - len(chosen)}
        metrics = {f"groups/{name}": float(number) for name, number in counted.items()}
        metrics["staleness/left_out"] = float(stale)
        return Collected(chosen, baselines, prompt_batches, metrics | self._scoring.metrics())

    async def _run(self, draw: tuple[int, Sample]) -> Group:
        (batch, sample), size = draw, self._config.training.group_size
        group = await run_group(sample, range(size), step=batch, context=self._context)
        if self._greedy is not None:
            self._alone[id(group)] = await run_group(sample, [size], step=batch, context=self._greedy)
        return group

    async def _score(self, group: Group) -> None:
        await score_group(group, self._scoring, self._context)
        if self._greedy is not None:
            await score_group(self._alone[id(group)], self._scoring, self._greedy)


def leave_out_stale(groups: Sequence[Group], version: int, max_lag: int) -> int:
    """Let episodes fail that hold tokens older than `max_lag` steps; returns how many.

    The order of collecting makes none, so they come from an engine that did not take the weights it was given.
    """
    stale = 0
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        age = age_of(trajectory, version)
        if trajectory.failure is None and age > max_lag:
            trajectory.failure = f"stale: its weights are {age} step(s) old, more than training.max_lag={max_lag}"
            trajectory.reward, trajectory.parts = None, {}
            stale += 1
    return stale


def age_of(trajectory: Trajectory, version: int) -> int:
    """By how many steps the oldest of its policy tokens lags behind this version."""
    written = [ledger.versions[ledger.loss_mask] for ledger in trajectory.segments]
    return version - int(min((versions.min() for versions in written if len(versions)), default=version))


def usable(group: Group) -> list[Trajectory]:
    """The siblings a baseline may count: not failed, and scored."""
    finished = [trajectory for trajectory in group.trajectories if trajectory.failure is None]
    for trajectory in finished:
        if trajectory.reward is None:
            raise DataError(f"sample {group.sample.id}, sibling {trajectory.sibling} has not been scored")
    return finished


@dataclass(frozen=True, slots=True)
class Filtered:
    """Groups that can teach a group baseline something, and those that cannot."""

    kept: list[Group]
    dropped: list[Group]


def keep_varied(groups: Sequence[Group], part: str | None = None) -> Filtered:
    """Dynamic sampling: keep groups whose usable trajectories differ in reward, in their order.

    `part` compares that part of the reward instead, such as accuracy when a length penalty makes all rewards differ.
    """
    varied: list[Group] = []
    dropped: list[Group] = []
    for group in groups:
        values = {_compared(trajectory, part) for trajectory in usable(group)}
        (varied if len(values) > 1 else dropped).append(group)
    return Filtered(varied, dropped)


def _compared(trajectory: Trajectory, part: str | None) -> float | None:
    if part is None:
        return trajectory.reward
    if part not in trajectory.parts:
        known = ", ".join(sorted(trajectory.parts)) or "none"
        raise DataError(f"sample {trajectory.sample.id} has no reward part {part!r}; it has: {known}")
    return trajectory.parts[part]

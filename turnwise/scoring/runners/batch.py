"""The `batch` runner: trajectories that are scored at the same time are given to a function in one call.

Such a function is `f(trajectories, *, option=...)`, verl's `compute_score(data_sources, solution_strs, ground_truths,
extra_infos)` or TRL's `f(prompts, completions, **columns)`; it returns one result for each, in their order. Scorers of
one trajectory run here as they do inline.
"""

import asyncio
import functools
import inspect
import reprlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, PluginError, ScoringFailed, unknown
from turnwise.plugins import load
from turnwise.retrying import AttemptFailed
from turnwise.scoring.failures import ScoringStats, counted, retry_policy, score_retrying
from turnwise.scoring.scorer import BUILTIN, Scorer, ScorerSpec, solution_of, trl_score, verl_extra_info, verl_result
from turnwise.scoring.trl_rewards import Judged, TrlRewards, is_trl
from turnwise.types import Trajectory

DELAY_SECONDS = 0.02
"""Without a new trajectory, after which a batch that is not full is given away."""
_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths")
_BATCH = "trajectories"

BatchFunction = Callable[[list[Trajectory]], Awaitable[list[Any]]]


class BatchRunner:
    """One collector for each function."""

    def __init__(self, size: int, timeout: float, retries: int, delay: float = DELAY_SECONDS) -> None:
        self.stats = ScoringStats()
        self._size = size
        self._timeout = timeout
        self._retries = retries
        self._delay = delay
        self._collectors: weakref.WeakSet[_Collector] = weakref.WeakSet()  # each lives as long as its scorer

    def scorer(self, spec: ScorerSpec) -> Scorer:
        function = _batch_function(spec)
        if function is None:
            return counted(spec.make(), self.stats)
        collector = _Collector(lambda batch: self._call(function, batch, spec.name), self._size, self._delay)
        self._collectors.add(collector)

        async def scorer(trajectory: Trajectory) -> Any:
            result = await collector.add(trajectory)
            return trl_score(result) if isinstance(result, Judged | ScoringFailed) else result

        scorer.__qualname__ = spec.name
        return scorer

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        for collector in list(self._collectors):
            await collector.close()

    async def _call(self, function: BatchFunction, batch: list[Trajectory], name: str) -> list[Any]:
        async def attempt() -> list[Any]:
            try:
                with self.stats.timed():
                    async with asyncio.timeout(self._timeout) as limit:
                        return await function(batch)
            except TimeoutError as error:
                if not limit.expired():
                    raise  # the function's own
                text = f"scorer {name} did not score {len(batch)} trajectories within {self._timeout:g} s"
                raise AttemptFailed(text) from error

        return await score_retrying(attempt, retry_policy(self._retries), self.stats, scorer=name, count=len(batch))


class _Collector:
    """Trajectories that wait for a call. `add` puts one in and waits; a full batch, or the timer, wakes `_flush`."""

    def __init__(self, call: BatchFunction, size: int, delay: float) -> None:
        self._call = call
        self._size = size
        self._delay = delay
        self._waiting: list[tuple[Trajectory, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def add(self, trajectory: Trajectory) -> Any:
        """The trajectory's own result."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((trajectory, result))
        if self._timer is not None:
            self._timer.cancel()
        if len(self._waiting) >= self._size:
            self._flush()
        else:
            self._timer = loop.call_later(self._delay, self._flush)
        return await result

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for _, result in self._waiting:
            result.cancel()
        self._waiting.clear()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _flush(self) -> None:
        self._timer = None
        batch = [entry for entry in self._waiting if not entry[1].done()]  # without those who stopped waiting
        self._waiting = []
        if batch:
            task = asyncio.create_task(self._score(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _score(self, batch: Sequence[tuple[Trajectory, "asyncio.Future[Any]"]]) -> None:
        try:
            scores = await self._call([trajectory for trajectory, _ in batch])
        except asyncio.CancelledError:
            for _, result in batch:
                result.cancel()
            raise
        except Exception as error:  # it is raised by everybody who waits
            for _, result in batch:
                if not result.done():
                    result.set_exception(error)
            return
        for (_, result), score in zip(batch, scores, strict=True):
            if not result.done():
                result.set_result(score)


def _batch_function(spec: ScorerSpec) -> BatchFunction | None:
    """The function behind a spec when it takes many trajectories; its options are checked. Else None."""
    if spec.name in BUILTIN or not {":", "."} & set(spec.name):
        return None
    function = load(spec.name, "scorer")
    if is_trl(function):
        rewards = TrlRewards(function, spec.name, spec.options)
        return lambda batch: rewards.score(batch, _in_thread)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None  # not a function; whoever makes the ordinary scorer says so
    is_verl = all(name in parameters for name in _VERL_BATCH)
    if not is_verl and next(iter(parameters), None) != _BATCH:
        return None
    accepted = (*_VERL_BATCH, "extra_infos") if is_verl else (_BATCH,)
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    known = [name for name in parameters if name not in accepted]
    for key in spec.options:
        if key in accepted or (key not in known and not open_ended):
            raise ConfigError(f"scoring.options, scorer {spec.name}: {unknown('option', key, known)}")
    call = functools.partial(function, **spec.options)
    if is_verl:
        call = functools.partial(_verl_call, call, "extra_infos" in parameters or open_ended)
    return functools.partial(_run, call, inspect.iscoroutinefunction(function), spec.name, is_verl)


def _verl_call(function: Callable[..., Any], takes_infos: bool, batch: list[Trajectory]) -> Any:
    """verl's batch signature; as for a single one, the last assistant message is the solution."""
    columns: dict[str, Any] = {
        "data_sources": [trajectory.sample.data_source for trajectory in batch],
        "solution_strs": [solution_of(trajectory) for trajectory in batch],
        "ground_truths": [trajectory.sample.ground_truth for trajectory in batch],
    }
    if takes_infos:
        columns["extra_infos"] = [verl_extra_info(trajectory) for trajectory in batch]
    return function(**columns)


async def _run(
    function: Callable[[list[Trajectory]], Any], is_async: bool, name: str, is_verl: bool, batch: list[Trajectory]
) -> list[Any]:
    """One result for each trajectory of the batch."""
    result = function(batch) if is_async else await _in_thread(functools.partial(function, batch))
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        raise PluginError(
            f"scorer {name} returned {reprlib.repr(result)}; it must return a list, one result for each trajectory"
        )
    results = list(result)
    if len(results) != len(batch):
        raise PluginError(f"scorer {name} returned {len(results)} results for {len(batch)} trajectories")
    return [verl_result(one, name) for one in results] if is_verl else results


async def _in_thread(function: Callable[[], Any]) -> Any:
    """In a thread of its own, which cannot be ended: after a timeout it is left alone, and does not keep us here."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():
            return  # nobody waits for it any more
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def work() -> None:
        result: Any = None
        raised: BaseException | None = None
        try:
            result = function()
        except StopIteration as error:  # which no future can hold, as no coroutine can raise it
            raised = RuntimeError(f"scorer raised StopIteration: {error}")
        except BaseException as error:  # whatever it is belongs to the one who waits
            raised = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, raised)

    threading.Thread(target=work, name="batch scorer", daemon=True).start()
    return await done


def make(config: ScoringConfig) -> BatchRunner:
    """The runner for `scoring.run=batch`."""
    if config.batch_size < 1 or config.timeout <= 0 or config.retries < 0:
        raise ConfigError(
            "scoring.batch_size is at least 1, scoring.timeout is positive, scoring.retries is not negative"
        )
    return BatchRunner(config.batch_size, config.timeout, config.retries)

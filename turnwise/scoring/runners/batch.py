"""The `batch` runner: trajectories that are scored at the same time are given to a function in one call.

Such a function is `f(trajectories, *, option=...)`, or one that an extension reads (an adapter for `batch_scorer`); it
gives one result for each trajectory, in their order. Scorers of one trajectory run here as they do inline.
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
from turnwise.errors import ConfigError, PluginError, ScoringFailed
from turnwise.scoring.failures import ScoringStats, counted, retry_policy, score_retrying
from turnwise.scoring.scorer import Scorer, ScorerSpec, builtin_scorers, check_options, parameters_of
from turnwise.system.plugins import adapted, load
from turnwise.system.retrying import AttemptFailed
from turnwise.types import Trajectory

DELAY_SECONDS = 0.02
"""Without a new trajectory, after which a batch that is not full is given away."""
_BATCH = "trajectories"
"""The first parameter of a function of ours, by which it is known."""

BatchFunction = Callable[[list[Trajectory]], Awaitable[list[Any]]]
"""For each trajectory what a scorer may give, or the ScoringFailed that left it without a score."""


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
            if isinstance(result, ScoringFailed):
                raise result
            return result

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
        """Adds a trajectory to the next batch and waits for its own result."""
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
    if spec.name in builtin_scorers() or not {":", "."} & set(spec.name):
        return None
    function = load(spec.name, "scorer")
    parameters = parameters_of(function)
    if next(iter(parameters), None) != _BATCH:
        foreign: BatchFunction | None = adapted("batch_scorer", function, spec)
        return foreign
    check_options(spec, parameters, [_BATCH])
    call = functools.partial(function, **spec.options)
    is_async = inspect.iscoroutinefunction(function)

    async def score(batch: list[Trajectory]) -> list[Any]:
        return await results_of(functools.partial(call, batch), spec.name, len(batch), is_async=is_async)

    return score


async def results_of(call: Callable[[], Any], name: str, size: int, *, is_async: bool) -> list[Any]:
    """What a function says about a batch, one result for each; one that is not async is called in a thread."""
    result = call() if is_async else await in_thread(call)
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        raise PluginError(
            f"scorer {name} returned {reprlib.repr(result)}; it must return a list, one result for each trajectory"
        )
    results = list(result)
    if len(results) != size:
        raise PluginError(f"scorer {name} returned {len(results)} results for {size} trajectories")
    return results


async def in_thread(function: Callable[[], Any]) -> Any:
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

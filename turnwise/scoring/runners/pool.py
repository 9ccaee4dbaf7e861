"""The `pool` runner: scorers run in processes of their own, each trajectory with a timeout that is kept."""

import asyncio
import itertools
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, PluginError
from turnwise.scoring.client_options import check_processes
from turnwise.scoring.failures import ScoringStats, retry_policy, score_retrying
from turnwise.scoring.runners.worker import FRAME
from turnwise.scoring.scorer import KEPT_SCORERS, Score, Scorer, ScorerSpec
from turnwise.scoring.worker_replies import Answer, read_answer
from turnwise.storage.trajectories.rows import to_row
from turnwise.system import children
from turnwise.system.retrying import AttemptFailed
from turnwise.types import Trajectory

START_SECONDS = 120.0
"""For a worker to import its scorers, the first time perhaps from a slow disk."""
MAX_ANSWER = 16 * 1024 * 1024
POLL_SECONDS = 0.002


class PoolRunner:
    """A fixed number of workers. One that hangs or dies is replaced; the others never notice."""

    def __init__(self, workers: int, timeout: float, retries: int) -> None:
        self.stats = ScoringStats()
        self._workers = workers
        self._timeout = timeout
        self._retries = retries
        self._specs: dict[str, dict[str, Any]] = {}
        """What a new worker makes before its first job, those named last; any other it makes when it is asked."""
        self._slots: list[_Slot] = []
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()

    def scorer(self, spec: ScorerSpec) -> Scorer:
        spec.make()
        check_processes(spec, "scoring.run=pool")
        values = {"name": spec.name, "options": spec.options}
        try:
            head = json.dumps(values)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"scoring.options of {spec.name} cannot be given to another process: {error}") from error
        self._specs.pop(head, None)
        self._specs[head] = values
        if len(self._specs) > KEPT_SCORERS:
            del self._specs[next(iter(self._specs))]

        async def scorer(trajectory: Trajectory) -> Score:
            # As a row of JSON, not pickled: what comes from a plug-in is never executed here, nor there.
            job = f'{{"scorer": {head}, "trajectory": {json.dumps(to_row(trajectory))}}}'.encode()
            policy = retry_policy(self._retries)
            return await score_retrying(lambda: self._attempt(job, spec.name), policy, self.stats, scorer=spec.name)

        scorer.__qualname__ = spec.name
        return scorer

    async def start(self) -> None:
        """Start all workers; what keeps one from starting, such as a plug-in that fails there, is raised."""
        self._slots = [_Slot(self._specs) for _ in range(self._workers)]
        self._idle = asyncio.Queue()
        for slot in self._slots:
            slot.fill()
        try:
            for slot in self._slots:
                await slot.worker()
        except AttemptFailed as error:
            raise PluginError(f"scoring.run=pool: {error}; the scorers are {self._names()}") from error
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def stop(self) -> None:
        slots, self._slots = self._slots, []
        await asyncio.gather(*(slot.close() for slot in slots))

    def _names(self) -> str:
        return ", ".join(spec["name"] for spec in self._specs.values()) or "none"

    async def _attempt(self, job: bytes, name: str) -> Score:
        if not self._slots:
            raise RuntimeError("the scoring pool is not running")
        slot = await self._idle.get()  # waiting for a worker is not the scorer's time
        try:
            worker = await slot.worker()
            try:
                with self.stats.timed():
                    answer = await worker.ask(job, self._timeout, f"scorer {name}")
            except BaseException:  # also when we are cancelled: a late answer must not become the next trajectory's
                slot.discard()
                slot.fill()
                raise
        finally:
            self._idle.put_nowait(slot)
        return answer.score()


class _Slot:
    """One of the pool's workers, started anew when it ends."""

    def __init__(self, specs: Mapping[str, dict[str, Any]]) -> None:
        self._specs = specs
        self._starting: asyncio.Task[_Worker] | None = None
        self._reaping: set[asyncio.Task[int]] = set()
        self._closed = False

    def fill(self) -> None:
        """Begin to start a worker where there is none."""
        if self._starting is None and not self._closed:
            self._starting = asyncio.create_task(_Worker.start(list(self._specs.values())))

    async def worker(self) -> "_Worker":
        """The worker, when ready. AttemptFailed when it dies before that, or what its scorers raised when made."""
        if self._is_gone():
            self.discard()
        self.fill()
        if self._starting is None:
            raise RuntimeError("the scoring pool was stopped")
        return await asyncio.shield(self._starting)

    def discard(self) -> None:
        """Kill the worker, which has been started, and forget it."""
        task, self._starting = self._starting, None
        if task is not None and not task.cancelled() and task.exception() is None:
            task.result().kill()
            reaping = asyncio.create_task(task.result().reap())
            self._reaping.add(reaping)
            reaping.add_done_callback(self._reaping.discard)

    async def close(self) -> None:
        """Afterwards nothing is left of it."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()  # it then kills what it has started
            await asyncio.wait((self._starting,))
        self.discard()
        while self._reaping:
            await asyncio.wait(self._reaping)

    def _is_gone(self) -> bool:
        """Whether the worker died while it had nothing to do, or never came up."""
        task = self._starting
        if task is None or not task.done():
            return False
        return task.cancelled() or task.exception() is not None or task.result().is_gone()


class _Worker:
    """One process and the socket to it."""

    def __init__(
        self,
        process: children.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()

    @classmethod
    async def start(cls, specs: Sequence[dict[str, Any]]) -> "_Worker":
        """A worker that has made its scorers."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                process = children.start_interpreter("turnwise.scoring.runners.worker", theirs.fileno())
            except BaseException:
                writer.close()
                raise
        worker = cls(process, reader, writer)
        try:
            setup = json.dumps({"path": sys.path, "scorers": list(specs)}).encode()
            (await worker.ask(setup, START_SECONDS, "a worker of the scoring pool, while it started,")).score()
        except BaseException:
            worker.kill()
            await asyncio.shield(worker.reap())
            raise
        return worker

    async def ask(self, message: bytes, seconds: float, who: str) -> Answer:
        """The answer to one message; AttemptFailed when none comes in time, or none at all."""
        number = next(self._numbers)
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(FRAME.pack(number, len(message)) + message)
                await self._writer.drain()
                answered, length = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                if answered != number or length > MAX_ANSWER:
                    raise AttemptFailed(f"{who} wrote something to its socket that is not an answer")
                content = await self._reader.readexactly(length)
        except TimeoutError as error:
            raise AttemptFailed(f"{who} did not answer within {seconds:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.kill()
            raise AttemptFailed(f"{who} ended its process: {children.exit_words(await self.reap())}") from error
        return read_answer(content)

    def is_gone(self) -> bool:
        return self._reader.at_eof()

    def kill(self) -> None:
        """With all that its scorers have started."""
        children.kill(self._process)

    async def reap(self) -> int:
        """Wait for the end of a process that was killed, and close what led to it; its exit status."""
        self._writer.close()
        children.cut(self._process)
        while (status := self._process.poll()) is None:
            await asyncio.sleep(POLL_SECONDS)
        return status


def make(config: ScoringConfig) -> PoolRunner:
    """The runner for `scoring.run=pool`."""
    if config.workers < 0 or config.timeout <= 0 or config.retries < 0:
        raise ConfigError("scoring.workers and scoring.retries must not be negative, scoring.timeout must be positive")
    return PoolRunner(config.workers or len(os.sched_getaffinity(0)), config.timeout, config.retries)

"""Sandboxes in actors: a pool on each of some nodes, behind the interface of a pool on this machine.

A session stays on its node. When that goes away the session is made anew on another one by running its calls again;
if one of them then answers otherwise, its state is not what the episode saw, and the episode fails.
"""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from turnwise.errors import EngineError, EngineLost
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import SearchPath, joined
from turnwise.ext.ray.workers import Worker, Workers, shared
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.opening import SessionPool, open_pool
from turnwise.ext.sandbox.remote import RemoteReport
from turnwise.ext.sandbox.results import InputImage, Result
from turnwise.ext.sandbox.session import Session
from turnwise.ext.sandbox.zygote_process import SandboxLost

SANDBOX_CALLS = 1000
"""Sessions of one actor that may run at once; its pool decides how many do."""
MOVES = 3
"""How often a call is tried on another node."""
REPEATED_CALLS = 100
"""A session with more calls than this is not made anew."""

_numbers = itertools.count()
Opening = tuple[int, tuple[InputImage, ...], bool]
"""Seed, images and whether it forgets after each call."""


class SandboxActor:
    """A pool of sandboxes on a node. Made an actor by `Connection.actor`."""

    def __init__(self, path: SearchPath, config: SandboxConfig, output: int) -> None:
        path.enter()
        self._config, self._output = config, output
        self._pool: SessionPool
        self._sessions: dict[int, Session] = {}

    async def beat(self) -> None:
        """A sign of life, by a thread of its own."""

    async def open(self) -> None:
        """Prove the level; SandboxUnavailable where less than the wanted one holds."""
        self._pool = await open_pool(self._config, self._output).__aenter__()

    async def report(self) -> RemoteReport:
        """What the sandbox's probe proved on the actor's node."""
        proof = self._pool.report
        if proof is None:
            raise EngineError("the sandbox server does not report its level")
        return RemoteReport(proof.level, proof.text())

    async def run(self, number: int, opening: Opening, code: str, seconds: float | None) -> Result:
        """One call of a session, which is made when it is not there yet. SandboxLost comes back as a text."""
        session = self._sessions.get(number)
        if session is None:
            seed, images, stateless = opening
            session = self._sessions[number] = self._pool.session(seed=seed, images=images, stateless=stateless)
        return await session.run(code, seconds)

    async def end(self, number: int) -> None:
        """End a session; unknown ones are fine."""
        session = self._sessions.pop(number, None)
        if session is not None:
            await session.close()


class ClusterPool:
    """Sessions on the nodes of a cluster. Use it as an async context manager."""

    def __init__(self, cluster: RayConfig, config: SandboxConfig, output: int) -> None:
        self.report: RemoteReport | None = None
        self._cluster, self._config, self._output = cluster, config, output
        self._workers: Workers | None = None
        self._open = contextlib.AsyncExitStack()

    @property
    def workers(self) -> Workers:
        if self._workers is None:
            raise SandboxLost("the sandboxes of the cluster were not started")
        return self._workers

    async def __aenter__(self) -> Self:
        connection = await joined(self._cluster)
        make = connection.actor(
            SandboxActor,
            cpus=self._cluster.service_cpus,
            gpus=0,
            concurrency=SANDBOX_CALLS,
            scheduling_strategy="SPREAD",
        )
        path, config, output = SearchPath.here(), self._config, self._output

        def workers() -> Workers:
            return Workers(connection, "sandbox", lambda: make(path, config, output), self._cluster.sandboxes)

        try:
            key = f"sandbox {config} {output}"
            self._workers = await self._open.enter_async_context(shared(connection, key, workers))
            async with self._workers.working(await self._workers.take()) as actor:
                report: RemoteReport = await actor.report.remote()
        except BaseException:
            await self.close()
            raise
        words = f"sandboxes on {self._cluster.sandboxes} node(s) of the cluster; of one: {report.words}"
        self.report = replace(report, words=words)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def session(self, *, seed: int = 0, images: Sequence[InputImage] = (), stateless: bool = False) -> "ClusterSession":
        """A new session; a node is chosen at its first call."""
        return ClusterSession(self, next(_numbers), (seed, tuple(images), stateless))

    async def close(self) -> None:
        """Leave the actors, which end with their last user."""
        self._workers = None
        await self._open.aclose()


class ClusterSession:
    """A session on some node; one call at a time, as LocalSession."""

    def __init__(self, pool: ClusterPool, number: int, opening: Opening) -> None:
        self._pool, self._number, self._opening = pool, number, opening
        self._worker: Worker | None = None
        self._actor: Any = None
        """The one that has it."""
        self._calls: list[tuple[str, float | None, bytes]] = []
        """What was run, and what came of it."""
        self._lost: str | None = None
        self._turn = asyncio.Lock()

    async def run(self, code: str, seconds: float | None = None) -> Result:
        """Run once; SandboxLost when the machinery failed, which says nothing about the code."""
        async with self._turn:
            if self._lost is not None:
                raise SandboxLost(f"the variables of this session were lost: {self._lost}")
            problem = ""
            for _ in range(MOVES):
                try:
                    result = await self._run(code, seconds)
                except EngineLost as error:
                    problem, self._worker, self._actor = str(error), None, None
                    continue
                except BaseException as error:
                    if self._calls:
                        self._lost = str(error) or type(error).__name__
                    self._leave()
                    raise
                if not result.kept or self._opening[2]:
                    self._calls.clear()
                else:
                    self._calls.append((code, seconds, _digest(result)))
                return result
            raise SandboxLost(f"{MOVES} nodes were lost one after the other: {problem}")

    async def close(self) -> None:
        """End it; nothing of it is left."""
        worker, actor = self._worker, self._actor
        self._lost, self._worker, self._actor = "it was closed", None, None
        if worker is not None and worker.actor is actor:
            with contextlib.suppress(EngineLost):  # it went with its node
                async with self._pool.workers.working(worker) as there:
                    await there.end.remote(self._number)

    def _leave(self) -> None:
        """After half a call, which goes on over there: the next one must not find what it leaves behind."""
        number, actor = self._number, self._actor
        self._number, self._worker, self._actor = next(_numbers), None, None
        if actor is not None:
            actor.end.remote(number)  # not waited for: a node that is gone has nothing to end

    async def _run(self, code: str, seconds: float | None) -> Result:
        workers = self._pool.workers
        if self._worker is not None and self._worker.actor is not self._actor:
            self._worker = self._actor = None  # another one has its place already
        moved = self._worker is None and bool(self._calls)
        worker = self._worker = self._worker or await workers.take()
        async with workers.working(worker) as actor:
            self._actor = actor
            for earlier, limit, came in self._calls if moved else ():
                if len(self._calls) > REPEATED_CALLS:
                    raise SandboxLost(f"its node went away, and it had more than {REPEATED_CALLS} calls")
                again = await actor.run.remote(self._number, self._opening, earlier, limit)
                if _digest(again) != came:
                    raise SandboxLost("its node went away, and on another one its calls answered otherwise")
            result: Result = await actor.run.remote(self._number, self._opening, code, seconds)
        return result


def _digest(result: Result) -> bytes:
    """What an episode saw of a result."""
    visible = (result.status.value, result.stdout, result.stderr, result.value, len(result.images), result.kept)
    return hashlib.blake2b(repr(visible).encode("utf-8", "surrogatepass"), digest_size=16).digest()

"""The sandbox of the `code_tests` scorer: one pool for all calls in an event loop, open from the first to the last."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.choices import SandboxLevel
from turnwise.errors import ConfigError, unknown
from turnwise.sandbox.limits import MIB, Limits
from turnwise.sandbox.pool import PoolSettings, SandboxPool
from turnwise.sandbox.remote import RemotePool
from turnwise.scoring.loop_resources import loop_resource

OUTPUT = 1_000_000
"""Characters of what a test may print; programs are compared with all of it."""
WARM = 4
Pool = SandboxPool | RemotePool


@dataclass(frozen=True, slots=True)
class CodeSandbox:
    """Which sandbox: `CodeSandbox(seconds=2)`."""

    seconds: float = 10.0
    memory_mb: int = 512
    level: str = SandboxLevel.auto.value
    min_level: str = SandboxLevel.L2.value
    preload: tuple[str, ...] = ()
    url: str | None = None
    token_env: str = "TURNWISE_SANDBOX_TOKEN"

    @property
    def limits(self) -> Limits:
        return Limits(seconds=self.seconds, memory=self.memory_mb * MIB, output=OUTPUT)

    def pool(self) -> Pool:
        """Still to be entered."""
        level, min_level = _level(self.level), _level(self.min_level)
        if self.url is None:
            return SandboxPool(PoolSettings(level, min_level, self.limits, self.preload, WARM))
        token = os.environ.get(self.token_env)
        return RemotePool(self.url, token, self.seconds, min_level=min_level, output=OUTPUT)


class LoopPool:
    """A pool with a task that keeps it open, so that it is closed with the event loop when nobody closes it before."""

    def __init__(self, sandbox: CodeSandbox) -> None:
        self._sandbox = sandbox
        self._opened: asyncio.Future[Pool] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep())

    async def opened(self) -> Pool:
        """The pool, as soon as it is open; the error when it could not be opened."""
        return await asyncio.shield(self._opened)

    async def close(self) -> None:
        """End every process of it."""
        self._end.set()
        await asyncio.wait((self._keeper,))

    async def _keep(self) -> None:
        try:
            async with self._sandbox.pool() as pool:
                self._opened.set_result(pool)
                await self._end.wait()
        except BaseException as error:  # whoever waits for the pool gets it; a later one was raised by closing
            if self._opened.done():
                raise
            self._opened.set_exception(error)
            self._opened.exception()  # seen: perhaps nobody waits any more


async def opened(sandbox: CodeSandbox) -> Pool:
    """The pool of these settings in the running event loop; `close_loop_resources` closes it."""
    return await loop_resource(LoopPool, sandbox, lambda: LoopPool(sandbox)).opened()


def _level(name: str) -> SandboxLevel:
    if name not in SandboxLevel.__members__:
        raise ConfigError(f"scoring.options, scorer code_tests: {unknown('level', name, SandboxLevel.__members__)}")
    return SandboxLevel[name]


def frozen(preload: Sequence[str]) -> tuple[str, ...]:
    """A list of packages as part of a key."""
    if isinstance(preload, str):
        raise ConfigError(f"scoring.options, scorer code_tests: preload must be a list, not {preload!r}")
    return tuple(preload)

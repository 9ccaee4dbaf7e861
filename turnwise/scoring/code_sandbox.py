"""The sandbox of the `code_tests` scorer: one pool for all calls in an event loop, open from the first to the last."""

import asyncio
from collections.abc import Sequence

from turnwise.choices import SandboxLevel
from turnwise.config import SandboxConfig
from turnwise.errors import ConfigError, unknown
from turnwise.sandbox.limits import Limits
from turnwise.sandbox.opening import open_pool, pool_settings
from turnwise.sandbox.pool import SandboxPool
from turnwise.sandbox.remote import RemotePool
from turnwise.scoring.loop_resources import loop_resource

OUTPUT = 1_000_000
"""Characters of what a test may print; programs are compared with all of it."""
Pool = SandboxPool | RemotePool


def sandbox_config(
    *,
    seconds: float = SandboxConfig.seconds,
    memory_mb: int = SandboxConfig.memory_mb,
    preload: Sequence[str] = (),
    level: str = SandboxLevel.auto.name,
    min_level: str = SandboxLevel.L2.name,
    url: str | None = None,
) -> SandboxConfig:
    """The sandbox that a scorer's options ask for."""
    if isinstance(preload, str):
        raise ConfigError(f"scoring.options, scorer code_tests: preload must be a list, not {preload!r}")
    return SandboxConfig(
        level=_level(level), min_level=_level(min_level), seconds=seconds, memory_mb=memory_mb, preload=list(preload),
        url=url,
    )  # fmt: skip


def limits_of(config: SandboxConfig) -> Limits:
    """What one session of a test may use."""
    return pool_settings(config, OUTPUT).limits


class LoopPool:
    """A pool with a task that keeps it open, so that it is closed with the event loop when nobody closes it before."""

    def __init__(self, sandbox: SandboxConfig) -> None:
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
            async with open_pool(self._sandbox, OUTPUT) as pool:
                self._opened.set_result(pool)
                await self._end.wait()
        except BaseException as error:  # whoever waits for the pool gets it; a later one was raised by closing
            if self._opened.done():
                raise
            self._opened.set_exception(error)
            self._opened.exception()  # seen: perhaps nobody waits any more


async def opened(sandbox: SandboxConfig) -> Pool:
    """The pool of these settings in the running event loop; `close_loop_resources` closes it."""
    return await loop_resource(LoopPool, repr(sandbox), lambda: LoopPool(sandbox)).opened()


def _level(name: str) -> SandboxLevel:
    if name not in SandboxLevel.__members__:
        raise ConfigError(f"scoring.options, scorer code_tests: {unknown('level', name, SandboxLevel.__members__)}")
    return SandboxLevel[name]

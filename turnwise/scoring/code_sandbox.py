"""The sandbox of the `code_tests` scorer: one pool for all calls in an event loop, open from the first to the last."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from turnwise.choices import SandboxLevel
from turnwise.config import SandboxConfig
from turnwise.errors import ConfigError, unknown
from turnwise.sandbox.limits import Limits
from turnwise.sandbox.opening import Pool, open_pool, pool_settings
from turnwise.scoring.loop_resources import KeptOpen, loop_resource

OUTPUT = 1_000_000
"""Characters of what a test may print; programs are compared with all of it."""


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


async def opened(sandbox: SandboxConfig) -> Pool:
    """The pool of these settings in the running event loop; `close_loop_resources` closes it."""
    kept: KeptOpen[Pool] = loop_resource(KeptOpen, ("code", repr(sandbox)), lambda: KeptOpen(lambda: _pool(sandbox)))
    return await kept.opened()


def _pool(sandbox: SandboxConfig) -> AbstractAsyncContextManager[Pool]:
    return open_pool(sandbox, OUTPUT)


def _level(name: str) -> SandboxLevel:
    if name not in SandboxLevel.__members__:
        raise ConfigError(f"scoring.options, scorer code_tests: {unknown('level', name, SandboxLevel.__members__)}")
    return SandboxLevel[name]

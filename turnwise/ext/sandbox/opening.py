"""From the `sandbox` section of a config to a pool of sandboxes: on this machine, or at a server."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, Self

from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.limits import MIB, Limits
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.probe import SandboxReport
from turnwise.ext.sandbox.results import InputImage
from turnwise.ext.sandbox.session import Session

if TYPE_CHECKING:
    from turnwise.ext.sandbox.remote import RemoteReport

TOKEN_ENV = "TURNWISE_SANDBOX_TOKEN"
"""The environment variable that holds the token of a sandbox server."""


class SessionPool(Protocol):
    """Where sessions are made; an async context manager."""

    @property
    def report(self) -> "SandboxReport | RemoteReport | None":
        """What was proven of it when it was entered."""
        ...

    def session(self, *, seed: int = 0, images: Sequence[InputImage] = (), stateless: bool = False) -> Session:
        """A new session, which starts with this seed and these images."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def close(self) -> None:
        """Ends all sessions."""
        ...


_elsewhere: ContextVar[Callable[[SandboxConfig, int], SessionPool] | None] = ContextVar(
    "sandboxes elsewhere", default=None
)


@contextlib.contextmanager
def remote_pools(open_there: Callable[[SandboxConfig, int], SessionPool]) -> Iterator[None]:
    """In this block, and what it starts, pools that would be on this machine are opened by somebody else."""
    before = _elsewhere.set(open_there)
    try:
        yield
    finally:
        _elsewhere.reset(before)


def open_pool(config: SandboxConfig, output: int = Limits().output) -> SessionPool:
    """The pool that a config asks for, still to be entered; `output` is Limits.output."""
    if config.url is None:
        there = _elsewhere.get()
        return SandboxPool(pool_settings(config, output)) if there is None else there(config, output)
    from turnwise.ext.sandbox.remote import RemotePool

    token = os.environ.get(TOKEN_ENV)
    return RemotePool(config.url, token, config.seconds, min_level=config.min_level, output=output)


def pool_settings(config: SandboxConfig, output: int = Limits().output) -> PoolSettings:
    """The settings of a pool on this machine, as the config has them."""
    memory, scratch = config.memory_mb * MIB, config.scratch_mb * MIB
    limits = Limits(seconds=config.seconds, memory=memory, scratch=scratch, output=output)
    return PoolSettings(config.level, config.min_level, limits, tuple(config.preload))

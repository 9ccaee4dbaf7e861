"""From the `sandbox` section of a config to a pool of sandboxes: on this machine, or at a server."""

import os
from typing import TYPE_CHECKING

from turnwise.config import SandboxConfig
from turnwise.sandbox.limits import MIB, Limits
from turnwise.sandbox.pool import PoolSettings, SandboxPool

if TYPE_CHECKING:
    from turnwise.sandbox.remote import RemotePool

TOKEN_ENV = "TURNWISE_SANDBOX_TOKEN"
"""The environment variable that holds the token of a sandbox server."""


def open_pool(config: SandboxConfig, output: int = Limits().output) -> "SandboxPool | RemotePool":
    """The pool that a config asks for, still to be entered; `output` is Limits.output."""
    if config.url is None:
        return SandboxPool(pool_settings(config, output))
    from turnwise.sandbox.remote import RemotePool

    token = os.environ.get(TOKEN_ENV)
    return RemotePool(config.url, token, config.seconds, min_level=config.min_level, output=output)


def pool_settings(config: SandboxConfig, output: int = Limits().output) -> PoolSettings:
    """A pool on this machine."""
    memory, scratch = config.memory_mb * MIB, config.scratch_mb * MIB
    limits = Limits(seconds=config.seconds, memory=memory, scratch=scratch, output=output)
    return PoolSettings(config.level, config.min_level, limits, tuple(config.preload))

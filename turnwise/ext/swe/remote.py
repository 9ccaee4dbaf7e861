"""Repositories at a server, with the contract of those on this machine: act, close, and how the tests went."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.opening import TOKEN_ENV
from turnwise.ext.sandbox.remote import SHORT_SECONDS, RemotePool
from turnwise.ext.sandbox.shell.pool import ShellPool, shell_settings
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.ext.swe.repository import ActionResult, Instance, SuiteOutcome, SweTests
from turnwise.ext.swe.wire import (
    Action,
    ActionAnswer,
    ActionRequest,
    EndAnswer,
    EndRequest,
    RewardAnswer,
    StartAnswer,
    SweRewardRequest,
    SweStartRequest,
)

REWARD_SECONDS = 300.0
SID = "sid"
"""The recorded fact that names the server's session."""


class SweClient(RemotePool):
    """A server of repositories. Whatever goes wrong with it is SandboxLost or SandboxUnavailable, never a reward."""

    def workspace(self, instance: Instance) -> "RemoteWorkspace":
        """A repository there; it is started by the first action."""
        return RemoteWorkspace(self, instance)

    async def start(self, instance: Instance) -> str:
        """A session of the server, by its id."""
        sent = instance if instance.files else None
        request = SweStartRequest(instance_id=instance.instance_id, instance=sent)
        return (await self.ask("POST", "/start_instance", request, StartAnswer, REWARD_SECONDS)).sid

    async def compute_reward(self, sid: str, tests: SweTests | None) -> SuiteOutcome:
        """How the tests went on what a session changed."""
        request = SweRewardRequest(sid=sid, tests=tests)
        answer = await self.ask("POST", "/compute_reward", request, RewardAnswer, REWARD_SECONDS)
        if answer.f2p_count > answer.f2p_total or answer.p2p_count > answer.p2p_total:
            raise SandboxLost("the sandbox server counts more tests passed than there are")
        return SuiteOutcome(answer.f2p_count, answer.f2p_total, answer.p2p_count, answer.p2p_total)


def open_shells(config: SandboxConfig, url: str | None) -> ShellPool | SweClient:
    """Where a config has its repositories, still to be entered: on this machine, or at a server."""
    if url is None:
        return ShellPool(shell_settings(config))
    return SweClient(url, os.environ.get(TOKEN_ENV), config.seconds, min_level=config.min_level)


class RemoteWorkspace:
    """A repository at a server; one action at a time."""

    def __init__(self, client: SweClient, instance: Instance) -> None:
        self.instance = instance
        self._client = client
        self._sid: str | None = None
        self._turn = asyncio.Lock()

    async def act(self, name: str, arguments: Mapping[str, Any]) -> ActionResult:
        """bash, edit or finish; SandboxLost when the server failed."""
        client = self._client
        async with self._turn:
            self._sid = self._sid or await client.start(self.instance)
            action = ActionRequest(sid=self._sid, action=Action(name=name, arguments=dict(arguments)))
            answer = await client.ask("POST", "/process_action", action, ActionAnswer, client.waiting(client.seconds))
            return ActionResult(answer.observation, answer.failed, answer.done, {**answer.facts, SID: self._sid})

    async def close(self) -> None:
        """No more actions; the server keeps what the reward needs."""
        sid, self._sid = self._sid, None
        if sid is not None:
            await self._client.ask("POST", "/postprocess", EndRequest(sid=sid), EndAnswer, SHORT_SECONDS)

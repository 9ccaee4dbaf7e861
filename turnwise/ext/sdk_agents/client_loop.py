"""The loop of a user's own agent: code written against an SDK, whose calls come to us and are recorded and trained."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.errors import EpisodeError, TurnwiseError, one_line
from turnwise.ext.sdk_agents.agent_errors import is_of_the_policy
from turnwise.ext.sdk_agents.loop import RESULT
from turnwise.ext.sdk_agents.server import client_server
from turnwise.ext.sdk_agents.sessions import ClientSession
from turnwise.rollout import plugin_calls
from turnwise.rollout.conversation import Conversation, EpisodeEnd
from turnwise.types import StopReason

LONGEST_ERROR = 1000


@dataclass(frozen=True, slots=True)
class ClientLoop:
    """The loop of the configured agent: it works with a base URL of its own, and its calls are the episode's turns."""

    client: Callable[..., Any]
    spec: str
    """How the config names it."""
    brings_tools: ClassVar[bool] = True
    """The agent has its own tools, and is its own user."""

    def running(self) -> AbstractAsyncContextManager[object]:
        """The server that agents call is there for the whole run."""
        return client_server()

    async def __call__(self, chat: Conversation) -> None:
        session, name = ClientSession(chat), f"client {self.spec}"
        result, failure = None, None
        async with client_server() as server, server.open(session) as base_url:
            try:
                plugin_calls.check_leaked()
                await server.in_turn()
                result = await plugin_calls.in_task(plugin_calls.call(self.client, base_url, chat.sample))
            except TurnwiseError:
                raise
            except Exception as error:  # a user's code: an SDK's error when the episode is over, or its own mistake
                failure = error
        if session.broken is not None:
            raise session.broken
        if chat.ended is not None:
            raise EpisodeEnd(chat.ended) from failure
        if failure is not None and is_of_the_policy(failure, session):
            chat.facts.agent_error = one_line(failure)[:LONGEST_ERROR]
            raise EpisodeEnd(StopReason.AGENT_ERROR) from failure
        if failure is not None:
            raise EpisodeError(f"{name}: {one_line(failure)}") from failure
        if not chat.turns:
            raise EpisodeError(f"{name} has had no answer of the model")
        if result is not None:
            chat.artifacts[RESULT] = _kept(result, name)


def _kept(result: Any, name: str) -> Any:
    """What the agent returned, as a record keeps it."""
    try:
        return json.loads(json.dumps(result, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeError(f"{name} returned what no record can keep: {one_line(error)}") from error

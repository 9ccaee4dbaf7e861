"""The loop of a user's own agent: code written against an SDK, whose calls come to us and are recorded and trained."""

import functools
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any

from turnwise.config import RolloutConfig
from turnwise.errors import ConfigError, EpisodeError, PluginError, TurnwiseError, one_line
from turnwise.plugins import load
from turnwise.rollout import plugin_calls
from turnwise.rollout.conversation import Conversation, EpisodeEnd
from turnwise.types import StopReason

RESULT = "client_result"
"""The artifact that has what the agent returned."""
ERROR = "agent_error"
"""The artifact that has what the agent raised because of what the policy wrote."""
LONGEST_ERROR = 1000
IGNORED = "client_ignored"
"""The artifact that lists what the agent asked for and did not get."""


async def openai_client(chat: Conversation, client: Callable[..., Any]) -> None:
    """Let the agent work with a base URL of its own; its calls are the episode's turns."""
    from turnwise.rollout.client_api.agent_errors import is_of_the_policy
    from turnwise.rollout.client_api.server import client_server
    from turnwise.rollout.client_api.sessions import Session

    session, name = Session(chat), f"client {chat.rollout.client}"
    result, failure = None, None
    async with client_server() as server, server.open(session) as base_url:
        try:
            plugin_calls.check_leaked()
            await server.in_turn()
            result = await plugin_calls.in_task(plugin_calls.call(client, base_url, chat.sample))
        except TurnwiseError:
            raise
        except Exception as error:  # a user's code: an SDK's error when the episode has ended, or a mistake of its own
            failure = error
    if session.broken is not None:
        raise session.broken
    if chat.ended is not None:
        raise EpisodeEnd(chat.ended) from failure
    if failure is not None and is_of_the_policy(failure, session):
        chat.artifacts[ERROR] = one_line(failure)[:LONGEST_ERROR]
        raise EpisodeEnd(StopReason.AGENT_ERROR) from failure
    if failure is not None:
        raise EpisodeError(f"{name}: {one_line(failure)}") from failure
    if not chat.turns:
        raise EpisodeError(f"{name} has had no answer of the model")
    if result is not None:
        chat.artifacts[RESULT] = _kept(result, name)


def loop_of(config: RolloutConfig) -> Callable[[Conversation], Awaitable[None]]:
    """The loop of the configured agent; an error for one that cannot be run."""
    spec = config.client
    if spec is None:
        raise ConfigError(
            "the agent openai_client runs your own: set rollout.client to module:function or to exec:COMMAND"
        )
    try:
        import turnwise.rollout.client_api.server  # noqa: F401
        from turnwise.rollout.client_api import command_agent
    except ModuleNotFoundError as error:
        raise ConfigError(f"rollout.client needs {error.name}: pip install turnwise[server]") from error
    if spec.startswith(command_agent.PREFIX):
        return functools.partial(openai_client, client=command_agent.command_agent(spec, config.client_env))
    client = load(spec, "client")
    if not callable(client) or isinstance(client, type):
        raise PluginError(f"client {spec!r} must be a function, not {type(client).__name__}")
    try:
        inspect.signature(client).bind("", None)
    except TypeError as error:
        raise PluginError(f"client {spec!r} must take a base URL and a sample: {error}") from error
    return functools.partial(openai_client, client=client)


def _kept(result: Any, name: str) -> Any:
    """What the agent returned, as a record keeps it."""
    try:
        return json.loads(json.dumps(result, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeError(f"{name} returned what no record can keep: {one_line(error)}") from error

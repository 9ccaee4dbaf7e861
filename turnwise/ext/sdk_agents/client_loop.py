"""The loop of a user's own agent: code written against an SDK, whose calls come to us and are recorded and trained."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.errors import EpisodeError, TurnwiseError, one_line
from turnwise.ext.sdk_agents.command_agent import CommandEnded, CommandFailed
from turnwise.ext.sdk_agents.loop import RESULT
from turnwise.ext.sdk_agents.server import client_server
from turnwise.ext.sdk_agents.sessions import ClientSession
from turnwise.rollout import plugin_calls
from turnwise.rollout.conversation import Conversation, EpisodeEnd
from turnwise.types import StopReason

LONGEST_ERROR = 1000
_MACHINERY = (OSError, ImportError, MemoryError, TurnwiseError, EpisodeError, plugin_calls.PluginCallError)
"""OSError has the connections, the files and the time that was up: TimeoutError is one."""
_NETWORK = frozenset({"httpx", "httpx2", "httpcore", "h11", "h2", "http", "urllib3", "requests", "aiohttp", "grpc"})
"""Packages whose every exception is of the network."""
_NETWORK_NAMES = re.compile(r"Connect|Timeout|TimedOut|Network|Transport|Unavailable|RateLimit|ModuleNotFound|Import")
"""In the names of exceptions, also of packages that nobody here knows."""
_PYTHONS_LAST_WORDS = re.compile(r"^(?:[\w.]+\.)?(\w+)(?::|$)", re.ASCII)


def is_of_the_policy(error: BaseException, session: ClientSession) -> bool:
    """Whether an agent raised this because of what the policy wrote: an unknown tool, a schema that does not fit, an
    answer that cannot be read.

    It is so when the policy has spoken, the newest answer of ours was its words and no refusal, and nothing in the
    chain of causes is a matter of the network, of files, of imports or our own. A context that is full counts too: it
    was filled by words.
    """
    if not session.has_spoken or session.broken is not None:
        return False
    if session.refusal is not None:
        return session.refusal.is_full
    return not any(_is_machinery(cause) for cause in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error with all that it came from, those of groups included."""
    waiting, visited = [error], set[int]()
    while waiting:
        current = waiting.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
        before = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        if before is not None:
            waiting.append(before)


def _is_machinery(error: BaseException) -> bool:
    if isinstance(error, CommandEnded):
        return _program_failed(error)
    if isinstance(error, (*_MACHINERY, CommandFailed)) or _status_of(error) is not None:
        return True
    return any(
        kind.__module__.partition(".")[0] in _NETWORK or _NETWORK_NAMES.search(kind.__name__)
        for kind in type(error).__mro__
    )


def _status_of(error: BaseException) -> int | None:
    """The HTTP status that an SDK's error stands for; ours are refusals, another service's are its own."""
    for holder in (error, getattr(error, "response", None)):
        status = getattr(holder, "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _program_failed(ended: CommandEnded) -> bool:
    """Of a program there are only its status and its last words: killed, not runnable, asking to be tried again
    (EX_TEMPFAIL), or Python's name for a matter of the network or of imports."""
    if ended.status < 0 or ended.status in (75, 126, 127):
        return True
    last = ended.words.rsplit("\n", 1)[-1].strip()
    named = _PYTHONS_LAST_WORDS.match(last)
    return named is not None and (named[1] in ("OSError", "MemoryError") or bool(_NETWORK_NAMES.search(named[1])))


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

"""Whose doing an agent's exception is: the policy's, whose episode counts, or the machinery's, whose episode failed."""

import re
from collections.abc import Iterator

from turnwise.errors import EpisodeError, TurnwiseError
from turnwise.ext.sdk_agents.command_agent import CommandEnded, CommandFailed
from turnwise.ext.sdk_agents.sessions import ClientSession
from turnwise.rollout import plugin_calls

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

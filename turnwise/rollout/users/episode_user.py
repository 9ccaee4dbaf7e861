"""A simulated user in one episode: asked once a turn, always closed; its errors are the episode's, with its name."""

import copy
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from turnwise.errors import EpisodeError, PluginError
from turnwise.rollout import plugin_calls
from turnwise.rollout.toolbox.toolbox import CLOSE_SECONDS
from turnwise.rollout.tools.tool import as_json, as_number
from turnwise.rollout.users.user import ClassUser, FunctionUser, Reply, User, UserContext, UserSession, UserTurn
from turnwise.types import InteractionSpec, Message, Sample, Turn

LONGEST_REPLY = 500_000
"""Characters of one message of a user: more would keep the event loop busy for many seconds, and fits no context."""
_BUILT_IN = __name__.rpartition(".")[0]


class EpisodeUser:
    """One user in one episode. Errors of its code become EpisodeErrors that name it."""

    def __init__(self, user: User, spec: InteractionSpec, sample: Sample, *, seed: int, episode: str) -> None:
        self.notes: list[dict[str, Any]] = []
        self.began = False
        """Whether `start` came to its end, so that the user can be asked."""
        # The episode's own copy: what a user changes in it is not seen by siblings.
        kwargs = {**copy.deepcopy(spec.kwargs), "name": spec.name}
        self._context = UserContext(sample, kwargs, seed, episode)
        self._user = user
        self._name = spec.name
        self._session: UserSession | None = None
        self._asked = 0
        self._turns_seen = 0
        self._score: float | None = None
        code: Any = type(user)
        if isinstance(user, FunctionUser | ClassUser):
            code = user.function if isinstance(user, FunctionUser) else user.kind
        self._is_ours = code.__module__.rpartition(".")[0] == _BUILT_IN
        """Whether it is a built-in user, which neither hangs nor blocks."""

    async def start(self) -> None:
        """Begin; from here on `finish` must be called."""
        self._session = await self._run("open", self._user.open, self._context)
        if (start := getattr(self._session, "start", None)) is not None:
            await self._run("start", start, self._context)
        self.began = True

    async def respond(self, messages: Sequence[Message], turns: Sequence[Turn]) -> Reply:
        """What the user says to the last of the policy's turns."""
        assert self._session is not None
        self._asked += 1
        context = self._context
        shown = UserTurn(
            context.sample,
            tuple(messages),
            tuple(turn.message for turn in turns),
            tuple(record for turn in turns[self._turns_seen :] for record in turn.calls),
            self._asked,
            context.kwargs,
            Random(f"{context.seed}/{self._asked}"),
        )
        self._turns_seen = len(turns)
        method = "" if isinstance(self._user, FunctionUser) else "reply"
        reply = self._checked(await self._run(method, self._session.reply, shown))
        self._score = self._score if reply.score is None else reply.score
        return reply

    async def finish(self, *, scored: bool) -> float | None:
        """The episode's score where it is wanted, after which the user forgets the episode."""
        score = None
        try:
            if scored and self.began:
                score = await self._final_score()
        finally:
            await self._closing("close")
        return score

    async def _final_score(self) -> float | None:
        if getattr(self._session, "score", None) is None:
            return self._score
        value = await self._closing("score")
        if value is None:
            return None
        return self._number(value, "score")

    async def _closing(self, method: str) -> Any:
        hook: Callable[[], Any] | None = getattr(self._session, method, None)
        return None if hook is None else await self._run(method, hook, seconds=CLOSE_SECONDS)

    def _checked(self, value: Any) -> Reply:
        """A returned value as a Reply that can be shown, counted and stored."""
        reply = Reply(end=True) if value is None else Reply(value) if isinstance(value, str) else value
        if not isinstance(reply, Reply):
            raise self._wrong(f"returned {repr(value)[:200]}, not text, a turnwise.Reply, or None to end")
        if not isinstance(reply.text, str) or not isinstance(reply.end, bool):
            raise self._wrong(f"returned {repr(reply)[:200]}, whose text must be text, and end true or false")
        if len(reply.text) > LONGEST_REPLY:
            raise self._wrong(f"returned {len(reply.text)} characters, not at most {LONGEST_REPLY}")
        if reply.note:
            note = as_json(dict(reply.note)) if isinstance(reply.note, Mapping) else None
            if note is None:
                raise self._wrong(f"returned the note {repr(reply.note)[:200]}, not a dict of JSON values")
            self.notes.append(note)
        score = None if reply.score is None else self._number(reply.score, "")
        return Reply(reply.text, score, reply.end, reply.note)

    def _number(self, value: Any, method: str) -> float:
        score = as_number(value)
        if score is None:
            does = f"{method} returned" if method else "returned"
            raise self._wrong(f"{does} {repr(value)[:200]}, not a finite number or None as the score")
        return score

    def _wrong(self, problem: str) -> EpisodeError:
        return EpisodeError(f"interaction {self._name!r} {problem}")

    async def _run(self, method: str, function: Callable[..., Any], *args: Any, seconds: float | None = None) -> Any:
        """Call a part of the user's code; within so many seconds where it is closing time."""
        who = f"interaction {self._name!r}{': ' if method else ''}{method}"
        try:
            if self._is_ours:
                return await plugin_calls.call(function, *args)
            if seconds is None:  # closing is never refused
                plugin_calls.check_leaked()
            return await plugin_calls.in_task(plugin_calls.call(function, *args), seconds)
        except (EpisodeError, PluginError):
            raise
        except plugin_calls.TookTooLong as error:
            raise EpisodeError(f"{who} took longer than {seconds:g} s") from error
        except plugin_calls.PluginCallError as error:
            raise EpisodeError(f"{who}: {error}") from error
        except Exception as error:  # a user's code: this episode fails, with its name
            raise EpisodeError(f"{who}: {type(error).__name__}: {error}") from error

"""What a simulated user is: a function from the assistant's turn to what is said next, or a class with `reply`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol, runtime_checkable

from turnwise.rollout import plugin_calls
from turnwise.types import CallRecord, Message, Sample


@dataclass(frozen=True, slots=True)
class UserContext:
    """What a user may know of its episode before the assistant has spoken."""

    sample: Sample
    kwargs: dict[str, Any]
    """The row's `interaction_kwargs`, with `name`, `query` and `ground_truth`: the episode's own copy."""
    seed: int = 0
    """The episode's own; the same when it is played again."""
    id: str = ""
    """Of the episode: no other has it."""


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What a user is shown each time the assistant has answered: all is to be read only.

    `turn.answer` is what was said; the sample has the ground truth, `turn.kwargs` what the row says of the user.
    """

    sample: Sample
    messages: tuple[Message, ...]
    """The conversation so far, the prompt first and the assistant's answer last."""
    answers: tuple[Message, ...]
    """Those of them that the policy wrote."""
    calls: tuple[CallRecord, ...] = ()
    """What tools were asked since the user last spoke, and how that went; `result` is what they replied."""
    number: int = 1
    """1 when the user is asked for the first time, then 2 ..."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The row's `interaction_kwargs`, with `name`, `query` and `ground_truth`."""
    random: Random = field(default_factory=lambda: Random(0))
    """Seeded by the episode and the number: drawn from, it gives the same when the episode is played again."""

    @property
    def answer(self) -> str:
        """What the assistant said last, without its reasoning and its tool calls."""
        return self.answers[-1].visible if self.answers else ""

    def result(self, record: CallRecord) -> str:
        """What the model was shown as the reply to a call."""
        replies = (message for message in reversed(self.messages) if message.tool_call_id == record.call.id)
        return next((message.text for message in replies), "")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a user says, and more than that: `Reply("Are you sure?", score=0.5)`, `Reply(end=True, score=1.0)`."""

    text: str = ""
    score: float | None = None
    """What the answer is worth; the last one given is the episode's."""
    end: bool = False
    """The user leaves: the text is not shown to the model."""
    note: Mapping[str, Any] | None = None
    """JSON values to be kept with the trajectory, in `facts.user_notes`."""


class UserSession(Protocol):
    """A user in one episode. It may also have `start(context)`, before the first turn, `score()`, which gives the
    episode's score at its end, and `close()`, called once on every path."""

    def reply(self, turn: UserTurn) -> Any:
        """Text, a Reply, or None to end the episode; async or plain."""
        ...


@runtime_checkable
class User(Protocol):
    """A simulated user as the rollout sees it: one for a run, which opens a session for each episode."""

    async def open(self, context: UserContext) -> UserSession:
        """The session that speaks for the user in one episode."""
        ...


UserLike = Callable[..., Any] | type | User
"""What a program may give as its user: a function or class of the contract, an object, or what an extension knows."""


@dataclass(frozen=True, slots=True)
class FunctionUser:
    """A user made from `async def user(turn, *, options)`; stateless. A plain function runs in a thread."""

    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    reads_kwargs: tuple[str, ...] | None = None
    """What it reads of a row's `interaction_kwargs`; None: anything."""

    async def open(self, context: UserContext) -> UserSession:
        return _FunctionSession(self)


@dataclass(frozen=True, slots=True)
class _FunctionSession:
    user: FunctionUser

    async def reply(self, turn: UserTurn) -> Any:
        return await plugin_calls.call(self.user.function, turn, **self.user.options)


@dataclass(frozen=True, slots=True)
class ClassUser:
    """A user with a state: an instance of the class, made with the options, serves one episode."""

    kind: type
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads_kwargs(self) -> tuple[str, ...] | None:
        """What the class says that it reads of a row's `interaction_kwargs`; None: anything."""
        return getattr(self.kind, "reads_kwargs", None)

    async def open(self, context: UserContext) -> UserSession:
        session: UserSession = await plugin_calls.call(lambda: self.kind(**self.options))
        return session


def is_user_class(value: object) -> bool:
    """Whether this is a class whose instances serve one episode each."""
    return inspect.isclass(value) and callable(getattr(value, "reply", None))

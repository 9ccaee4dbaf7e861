"""An environment on the other side of a conversation: it opens it, answers each message, and says what it was worth.

An environment owns the first messages and the tools, so it is an agent loop's matter and not an interaction's, which
answers a prompt that is already there.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turnwise.errors import EpisodeError
from turnwise.rollout import plugin_calls
from turnwise.rollout.conversation import Conversation
from turnwise.types import CallRecord, CallStatus, EnvironmentRecord, JsonSchema, Message, Role, ToolCall


@dataclass(frozen=True, slots=True)
class Opening:
    """What an environment begins with: its first messages, its tools and metrics."""

    messages: Sequence[Message]
    tools: Sequence[JsonSchema] = ()
    """Those that it runs itself."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers to one message."""

    messages: Sequence[Message]
    finished: bool
    reward: float | None
    """Of this message."""
    total: float | None
    """Of the episode so far; None while nothing was said of it."""
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode's environment. What it raises as an EpisodeError ends the episode, by name."""

    async def start(self) -> Opening: ...

    async def step(self, message: Message) -> Observation: ...

    async def close(self) -> None:
        """Ends the environment; it is called once, on every path."""
        ...


async def play(chat: Conversation, environment: Environment) -> None:
    """Talk with an environment until it or a budget ends the episode; it is closed on every path."""
    record = chat.facts.environment = EnvironmentRecord()
    try:
        opening = await environment.start()
        _count(record.metrics, opening.metrics)
        chat.reprompt(opening.messages, opening.tools)
        while not record.finished:
            message = await chat.generate()
            if unread := [call for call in message.tool_calls if call.problem is not None]:
                chat.add(await _refuse(chat, message, unread))
                continue
            observation = await environment.step(message)
            turn = chat.turns[-1]
            turn.user_score = observation.reward
            replies = _answers(message.tool_calls, observation.messages, turn.calls)
            _count(record.metrics, observation.metrics)
            record.finished = observation.finished
            record.reward = record.reward if observation.total is None else observation.total
            if observation.finished:
                turn.replies = replies  # recorded; nobody answers them
            elif not replies:
                raise EpisodeError("the environment neither finished nor said anything")
            else:
                chat.add(replies)
    finally:
        try:
            await plugin_calls.to_the_end(environment.close())
        except EpisodeError as error:  # what ended the episode is what counts; that something is left open is kept
            record.left_open = str(error)


def _count(totals: dict[str, float], metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        totals[name] = totals.get(name, 0.0) + value


async def _refuse(chat: Conversation, message: Message, unread: Sequence[ToolCall]) -> list[Message]:
    """Answers to a turn with calls that cannot be read: the environment is not asked, so that none is half executed."""
    replies = await chat.call_tools(dataclasses.replace(message, tool_calls=tuple(unread)))
    for call in message.tool_calls:
        if call.problem is None:
            chat.turns[-1].calls.append(CallRecord(call, CallStatus.REFUSED, 0.0))
            text = "Error: not run, since another call of this turn cannot be read"
            replies.append(Message(Role.TOOL, text, tool_call_id=call.id, name=call.name))
    return replies


def _answers(calls: Sequence[ToolCall], replies: Sequence[Message], records: list[CallRecord]) -> list[Message]:
    """The replies with the ids and names of the calls they answer, and a record of each call."""
    waiting = {call.id: call for call in calls}
    answers = []
    for reply in replies:
        if reply.role is Role.ASSISTANT:
            raise EpisodeError("the environment sent an assistant message; only the policy may")
        if reply.role is not Role.TOOL:
            answers.append(reply)
            continue
        call_id = reply.tool_call_id if reply.tool_call_id is not None else next(iter(waiting), None)
        call = None if call_id is None else waiting.pop(call_id, None)
        if call is None:
            raise EpisodeError(f"the environment answers the call {call_id!r}, which is not open")
        records.append(CallRecord(call, CallStatus.UNKNOWN, 0.0))
        answers.append(dataclasses.replace(reply, tool_call_id=call.id, name=call.name))
    records += [CallRecord(call, CallStatus.ERROR, 0.0) for call in waiting.values()]
    return answers

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
from turnwise.scoring.episode_scores import ENVIRONMENT
from turnwise.types import CallRecord, CallStatus, JsonSchema, Message, Role, ToolCall


@dataclass(frozen=True, slots=True)
class Opening:
    """How an environment begins."""

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
        """Called once, on every path."""
        ...


async def play(chat: Conversation, environment: Environment) -> None:
    """Talk with an environment until it or a budget ends the episode; it is closed on every path."""
    kept = chat.artifacts[ENVIRONMENT] = {"reward": None, "finished": False, "metrics": {}}
    try:
        opening = await environment.start()
        _count(kept["metrics"], opening.metrics)
        chat.reprompt(opening.messages, opening.tools)
        while not kept["finished"]:
            message = await chat.generate()
            if unread := [call for call in message.tool_calls if call.problem is not None]:
                chat.add(await _refuse(chat, message, unread))
                continue
            seen = await environment.step(message)
            turn = chat.turns[-1]
            turn.user_score = seen.reward
            replies = _answers(message.tool_calls, seen.messages, turn.calls)
            _count(kept["metrics"], seen.metrics)
            kept["finished"] = seen.finished
            kept["reward"] = kept["reward"] if seen.total is None else seen.total
            if seen.finished:
                turn.replies = replies  # recorded; nobody answers them
            elif not replies:
                raise EpisodeError("the environment neither finished nor said anything")
            else:
                chat.add(replies)
    finally:
        try:
            await plugin_calls.to_the_end(environment.close())
        except EpisodeError as error:  # what ended the episode is what counts; that something is left open is kept
            kept["left_open"] = str(error)


def _count(totals: dict[str, float], found: dict[str, float]) -> None:
    for name, value in found.items():
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
            raise EpisodeError("the environment speaks as the assistant; only the policy does")
        if reply.role is not Role.TOOL:
            answers.append(reply)
            continue
        given = reply.tool_call_id if reply.tool_call_id is not None else next(iter(waiting), None)
        call = None if given is None else waiting.pop(given, None)
        if call is None:
            raise EpisodeError(f"the environment answers the call {given!r}, which is not open")
        records.append(CallRecord(call, CallStatus.UNKNOWN, 0.0))
        answers.append(dataclasses.replace(reply, tool_call_id=call.id, name=call.name))
    records += [CallRecord(call, CallStatus.ERROR, 0.0) for call in waiting.values()]
    return answers

"""The conversation an agent loop drives: it records every turn, and a spent budget ends the episode with its reason."""

import dataclasses
import time
from collections.abc import Sequence
from typing import NoReturn

from turnwise.config import RolloutConfig, SamplingConfig
from turnwise.errors import PluginError
from turnwise.rollout.chat_backends import AssistantReply, ChatBackend
from turnwise.rollout.interaction_sessions import InteractionSession
from turnwise.rollout.toolbox import EpisodeTools, clean
from turnwise.types import CallStatus, FinishReason, Message, Role, Sample, StopReason, Turn


class EpisodeEnd(Exception):
    """Raised through the agent loop when the episode is over; carries the reason."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Conversation:
    """What an agent loop sees: `generate`, `call_tools`, `ask_user`, `add`.

    A loop alternates: generate, then add replies. Once the episode has ended, every call says so again.
    """

    def __init__(
        self,
        sample: Sample,
        backend: ChatBackend,
        tools: EpisodeTools,
        interaction: InteractionSession | None,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
    ) -> None:
        self.sample = sample
        self.messages: list[Message] = list(sample.prompt)
        self.turns: list[Turn] = []
        self.ended: StopReason | None = None
        self.broken: Exception | None = None
        """What kept the model from speaking; no matter of the agent loop, whatever it makes of it."""
        self._backend = backend
        self._tools = tools
        self._interaction = interaction
        self._rollout = rollout
        self._sampling = sampling
        self._user_turns = 0
        self._malformed = 0
        self._awaits_reply = False
        self._answer_end = 0
        """Messages up to and with the newest assistant message."""
        self._shown = False
        """Whether the newest assistant message was shown to the user."""

    async def generate(self) -> Message:
        """The next assistant message; records a Turn."""
        self._check_going_on()
        if self._awaits_reply:
            raise PluginError("the agent loop generates twice in a row: a reply must be added in between")
        if not self.turns:
            self._backend.open(self.sample.prompt)
        limit, reason = self._token_limit()
        start = time.perf_counter()
        try:
            reply = await self._backend.reply(len(self.turns), limit)
        except Exception as error:
            self.broken = error
            raise
        self.broken = None
        self.turns.append(self._record(reply, time.perf_counter() - start))
        self.messages.append(reply.message)
        self._awaits_reply, self._shown, self._answer_end = True, False, len(self.messages)
        if reply.finish_reason is FinishReason.LENGTH:
            self._end(reason)
        return reply.message

    async def call_tools(self, message: Message) -> list[Message]:
        """The tools' answers to this message's calls, one for each."""
        turn = self._last_turn()
        if not message.tool_calls:
            return []
        start, before = time.perf_counter(), len(turn.calls)
        replies = await self._tools.call(message.tool_calls, turn.calls)
        turn.reply_seconds += time.perf_counter() - start
        only_malformed = all(record.status is CallStatus.MALFORMED for record in turn.calls[before:])
        self._malformed = self._malformed + 1 if only_malformed else 0
        if self._malformed >= self._rollout.max_malformed_calls:
            turn.replies = replies
            self._end(StopReason.MALFORMED_CALL_BUDGET)
        return replies

    async def ask_user(self) -> list[Message]:
        """What the simulated user says to the last answer; nothing when there is no user."""
        self._last_turn()
        if self._interaction is None:
            return []
        ended, text = await self._ask(self._interaction)
        if ended:
            self._end(StopReason.USER_ENDED)
        limit = self._rollout.max_user_turns
        if limit is not None and self._user_turns >= limit:
            self._end(StopReason.USER_TURN_BUDGET)
        self._user_turns += 1
        return [Message(Role.USER, text)]

    def add(self, replies: Sequence[Message]) -> None:
        """Show replies to the model. A reply nobody could answer is recorded but not shown."""
        turn = self._last_turn()
        if not self._awaits_reply:
            raise PluginError("the agent loop adds replies twice in a row: it must generate in between")
        if any(reply.role is Role.ASSISTANT for reply in replies):
            raise PluginError("the agent loop adds an assistant message; only the policy speaks as the assistant")
        turn.replies = [_cleaned(reply) for reply in replies]
        limit = self._rollout.max_assistant_turns
        if limit is not None and len(self.turns) >= limit:
            self._end(StopReason.ASSISTANT_TURN_BUDGET)
        budget = None
        if self._rollout.max_tokens is not None:  # leave one for the assistant
            budget = self._rollout.max_tokens - self._backend.used() - 1
        full = self._backend.append_replies(self.messages, turn.replies, turn.index, budget)
        if full is not None:
            self._end(full)
        self.messages.extend(turn.replies)
        self._awaits_reply = False

    async def finish(self) -> None:
        """Show the user a last message that a budget or the loop kept from it, so that none goes unscored."""
        if self._interaction is not None and self._interaction.began and self.turns and not self._shown:
            await self._ask(self._interaction)

    def _check_going_on(self) -> None:
        if self.ended is not None:
            raise EpisodeEnd(self.ended)

    def _last_turn(self) -> Turn:
        self._check_going_on()
        if not self.turns:
            raise PluginError("the agent loop must generate first: the assistant has not replied yet")
        return self.turns[-1]

    def _end(self, reason: StopReason) -> NoReturn:
        self.ended = reason
        raise EpisodeEnd(reason)

    async def _ask(self, interaction: InteractionSession) -> tuple[bool, str]:
        self._shown = True  # before the answer: a user who hangs is not asked again
        start = time.perf_counter()
        # Replies that were added after it but never answered are not part of what the user is asked about.
        ended, text, score = await interaction.respond(self.messages[: self._answer_end])
        self.turns[-1].user_score = score
        self.turns[-1].reply_seconds += time.perf_counter() - start
        return ended, text

    def _token_limit(self) -> tuple[int, StopReason]:
        """(most tokens of this turn, the reason to give when it is hit)."""
        limit, reason = self._sampling.max_tokens, StopReason.TURN_TRUNCATED
        if self._rollout.max_tokens is not None and (left := self._rollout.max_tokens - self._backend.used()) < limit:
            limit, reason = left, StopReason.TOKEN_BUDGET
        room = self._backend.room()
        if room is not None and room < limit:
            limit, reason = room, StopReason.CONTEXT_FULL
        if limit <= 0:
            self._end(reason)
        return limit, reason

    def _record(self, reply: AssistantReply, seconds: float) -> Turn:
        return Turn(
            index=len(self.turns),
            message=reply.message,
            finish_reason=reply.finish_reason,
            policy_version=reply.policy_version,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            segment=reply.segment,
            start=reply.start,
            generate_seconds=seconds,
        )


def _cleaned(reply: Message) -> Message:
    """A reply whose text every tokenizer can take; tools and users are cleaned already, a loop's own words are not."""
    if not isinstance(reply.content, str) or (text := clean(reply.content)) == reply.content:
        return reply
    return dataclasses.replace(reply, content=text)

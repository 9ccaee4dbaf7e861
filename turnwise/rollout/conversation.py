"""The conversation an agent loop drives: it records every turn, and a spent budget ends the episode with its reason."""

import time
from collections.abc import Sequence

from turnwise.config import ExcessCalls, RolloutConfig, SamplingConfig
from turnwise.rollout.speakers import Speaker, Spoken
from turnwise.rollout.toolbox import EpisodeTools
from turnwise.rollout.users import SimulatedUser
from turnwise.types import CallStatus, FinishReason, Message, Role, Sample, StopReason, Turn


class EpisodeEnd(Exception):
    """Raised through the agent loop when the episode is over; carries the reason."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Conversation:
    """What an agent loop sees: `generate`, `call_tools`, `ask_user`, `add`."""

    def __init__(
        self,
        sample: Sample,
        speaker: Speaker,
        tools: EpisodeTools,
        user: SimulatedUser | None,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
    ) -> None:
        self.sample = sample
        self.messages: list[Message] = list(sample.prompt)
        self.turns: list[Turn] = []
        self._speaker = speaker
        self._tools = tools
        self._user = user
        self._rollout = rollout
        self._sampling = sampling
        self._user_turns = 0
        self._malformed = 0
        self._judged = False
        """Whether the user has seen the newest assistant message."""

    async def generate(self) -> Message:
        """The next assistant message; records a Turn."""
        if not self.turns:
            self._speaker.open(self.sample.prompt)
        limit, reason = self._token_limit()
        start = time.perf_counter()
        spoken = await self._speaker.speak(len(self.turns), limit)
        self.turns.append(self._record(spoken, time.perf_counter() - start))
        self.messages.append(spoken.message)
        self._judged = False
        if spoken.finish_reason is FinishReason.LENGTH:
            raise EpisodeEnd(reason)
        return spoken.message

    async def call_tools(self, message: Message) -> list[Message]:
        """The tools' answers to this message's calls, one for each."""
        turn = self.turns[-1]
        too_many = len(message.tool_calls) > self._rollout.max_parallel_calls
        if too_many and self._rollout.excess_calls is ExcessCalls.stop:
            raise EpisodeEnd(StopReason.PARALLEL_CALL_BUDGET)
        start = time.perf_counter()
        answered = await self._tools.call(message.tool_calls)
        turn.reply_seconds += time.perf_counter() - start
        turn.calls = [record for _, record in answered]
        only_malformed = all(record.status is CallStatus.MALFORMED for record in turn.calls)
        self._malformed = self._malformed + 1 if only_malformed else 0
        if self._malformed >= self._rollout.max_malformed_calls:
            raise EpisodeEnd(StopReason.MALFORMED_CALL_BUDGET)
        return [reply for reply, _ in answered]

    async def ask_user(self) -> list[Message]:
        """What the simulated user says to the last answer; nothing when there is no user."""
        if self._user is None:
            return []
        ended, text = await self._judge()
        if ended:
            raise EpisodeEnd(StopReason.USER_ENDED)
        limit = self._rollout.max_user_turns
        if limit is not None and self._user_turns >= limit:
            raise EpisodeEnd(StopReason.USER_TURN_BUDGET)
        self._user_turns += 1
        return [Message(Role.USER, text)]

    def add(self, replies: Sequence[Message]) -> None:
        """Show replies to the model. A reply nobody could answer is recorded but not shown."""
        turn = self.turns[-1]
        turn.replies = list(replies)
        limit = self._rollout.max_assistant_turns
        if limit is not None and len(self.turns) >= limit:
            raise EpisodeEnd(StopReason.ASSISTANT_TURN_BUDGET)
        room, reason = self._reply_limit()
        if not self._speaker.hear(self.messages, replies, turn.index, room):
            raise EpisodeEnd(reason)
        self.messages.extend(replies)

    async def finish(self) -> None:
        """Let the user judge a last answer that a budget kept from it, so that no answer goes unscored."""
        last = self.turns[-1] if self.turns else None
        if self._user is None or last is None or last.message.tool_calls:
            return
        if not self._judged:
            await self._judge()

    async def _judge(self) -> tuple[bool, str]:
        if self._user is None:
            raise ValueError("no user to ask")
        start = time.perf_counter()
        ended, text, score = await self._user.respond(self.messages)
        self._judged = True
        self.turns[-1].user_score = score
        self.turns[-1].reply_seconds += time.perf_counter() - start
        return ended, text

    def _token_limit(self) -> tuple[int, StopReason]:
        """(most tokens of this turn, the reason to give when it is hit)."""
        limits = [(self._sampling.max_tokens, StopReason.TURN_TRUNCATED)]
        if self._rollout.max_tokens is not None:
            limits.append((self._rollout.max_tokens - self._speaker.used(), StopReason.TOKEN_BUDGET))
        room = self._speaker.room()
        if room is not None:
            limits.append((room, StopReason.CONTEXT_FULL))
        limit, reason = min(limits, key=lambda entry: entry[0])
        if limit <= 0:
            raise EpisodeEnd(reason)
        return limit, reason

    def _reply_limit(self) -> tuple[int | None, StopReason]:
        """Tokens replies may take and still leave one for the assistant."""
        limits: list[tuple[int, StopReason]] = []
        if self._rollout.max_tokens is not None:
            limits.append((self._rollout.max_tokens - self._speaker.used() - 1, StopReason.TOKEN_BUDGET))
        room = self._speaker.room()
        if room is not None:
            limits.append((room - 1, StopReason.CONTEXT_FULL))
        return min(limits, key=lambda entry: entry[0]) if limits else (None, StopReason.CONTEXT_FULL)

    def _record(self, spoken: Spoken, seconds: float) -> Turn:
        return Turn(
            index=len(self.turns),
            message=spoken.message,
            finish_reason=spoken.finish_reason,
            policy_version=spoken.policy_version,
            prompt_tokens=spoken.prompt_tokens,
            completion_tokens=spoken.completion_tokens,
            segment=spoken.segment,
            start=spoken.start,
            generate_seconds=seconds,
        )

"""The conversation an agent loop drives: it records every turn, and a spent budget ends the episode with its reason."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from turnwise.chat.images.blocks import images_in
from turnwise.config import RolloutConfig, SamplingConfig
from turnwise.errors import PluginError
from turnwise.rollout.chat_backends import ChatBackend, cleaned, open_prompt, prepare_images_of
from turnwise.rollout.episode_limits import turn_limit
from turnwise.rollout.large_messages import is_large, off_loop
from turnwise.rollout.shared_episode import BranchEnd, EpisodeEnd, SharedEpisode
from turnwise.rollout.users.episode_user import EpisodeUser
from turnwise.types import (
    CallStatus,
    Completion,
    FinishReason,
    JsonSchema,
    Message,
    Origin,
    Role,
    Sample,
    StopReason,
    Turn,
)

__all__ = ["BranchEnd", "Conversation", "EpisodeEnd"]

_CUT = (StopReason.TURN_TRUNCATED, StopReason.CONTEXT_FULL)
OF_THE_CONVERSATION = (*_CUT, StopReason.MALFORMED_CALL_BUDGET, StopReason.TEMPLATE_REFUSED)
"""What ends the conversation it happens in; in a branch, the episode can go on without it. All else is its end."""


class Conversation:
    """What an agent loop sees: `generate`, `call_tools`, `ask_user`, `add`, and `fork` for a context beside this one.

    A loop alternates: generate, then add replies. Once the episode has ended, every call says so again. Conversations
    of one episode may be driven at the same time, each by one caller.
    """

    def __init__(
        self,
        shared: SharedEpisode,
        prompt: Sequence[Message],
        tools: Sequence[JsonSchema],
        *,
        name: str = "",
        trained: bool = True,
        user: EpisodeUser | None = None,
    ) -> None:
        self.name = name
        """The branch's; empty for the main conversation."""
        self.trained, self.facts = trained, shared.facts
        self.messages: list[Message] = list(prompt)
        self.turns: list[Turn] = []
        self.broken: Exception | None = None
        """What kept the model from speaking; no matter of the agent loop, whatever it makes of it."""
        self.cut: StopReason | None = None
        """Why the newest turn of `generate_ids` was cut off, if it was: the loop may yet go on."""
        self.by_ids = False
        """Whether it is driven by `generate_ids`: its messages are then only what the ids read."""
        self.backend: ChatBackend = shared.make_backend(name, len(shared.conversations), list(tools))
        self._shared = shared
        self._rollout: RolloutConfig = shared.rollout
        self._tools = shared.tools
        self._user = user
        self._ended: StopReason | None = None
        self._malformed = 0
        self._opened = False
        self._writing = False
        self._awaits_reply = False
        self._held: tuple[list[Message], int] | None = None
        """Replies that wait for tokens which other conversations hold, and how many messages came before them."""
        self._answer_end = 0
        """Messages up to and with the newest assistant message."""
        self._shown = False
        """Whether the newest assistant message was shown to the user."""
        shared.conversations.append(self)

    @property
    def sample(self) -> Sample:
        """The sample that the episode plays."""
        return self._shared.sample

    @property
    def artifacts(self) -> dict[str, Any]:
        """What the loop leaves on the trajectory for scorers and readers, as JSON values by name."""
        return self._shared.artifacts

    @property
    def seed(self) -> int:
        """The episode's own; the same when it is played again."""
        return self._shared.tools.seed

    @property
    def rollout(self) -> RolloutConfig:
        """What a loop may read of the config."""
        return self._rollout

    @property
    def sampling(self) -> SamplingConfig:
        """The sampling settings of the run."""
        return self._shared.sampling

    @property
    def ended(self) -> StopReason | None:
        """Why this conversation cannot go on."""
        return self._ended or self._shared.ended

    @property
    def tools(self) -> Sequence[JsonSchema]:
        """The tools that the model is shown here."""
        return self.backend.tools

    def reprompt(self, prompt: Sequence[Message], tools: Sequence[JsonSchema] | None = None) -> None:
        """Begin with this prompt, and these tools shown, instead of the sample's; before the first `generate`."""
        self._check_going_on()
        if self._opened or self._writing:
            raise PluginError("the agent loop sets a prompt after the model has spoken: fork the conversation instead")
        self.messages[:] = [cleaned(message) for message in prompt]
        if tools is not None:
            self._offer(tools)

    def fork(
        self, prompt: Sequence[Message], *, name: str, trained: bool = True, tools: Sequence[JsonSchema] | None = None
    ) -> "Conversation":
        """A fresh context in the same episode: its budgets, time and tools, but a ledger and noise of its own.

        The name says whose it is; the noise depends on it and on how many branches of that name came before. `tools`
        are those shown, null the same as here. A branch that is not `trained` is recorded and never learnt from.
        """
        self._check_going_on()
        shared = self._shared
        offered = self.tools if tools is None else tools
        branch = Conversation(
            shared, [cleaned(message) for message in prompt], offered, name=shared.unique_name(name), trained=trained
        )
        branch._tools = self._tools
        if tools is not None:
            branch._offer(tools)
        return branch

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Message:
        """The next assistant message; records a Turn.

        A turn that needs more than the caller's own `max_tokens` is cut there and the conversation may go on; `stop`
        are further strings to stop after.
        """
        self._check_free()
        if self.by_ids:
            raise PluginError("the agent loop uses one conversation by ids and by messages: fork it and use one each")
        if self._awaits_reply:
            raise PluginError("the agent loop generates twice in a row: a reply must be added in between")
        if not self._opened:
            await self._open()
        reason = await self._write(max_tokens, stop)
        turn = self.turns[-1]
        self.messages.append(turn.message)
        self._awaits_reply, self._shown, self._answer_end = True, False, len(self.messages)
        if turn.finish_reason is FinishReason.LENGTH and reason is not None:
            self._end(reason)
        return turn.message

    async def generate_ids(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        origin: Origin = Origin.TOOL,
    ) -> Completion:
        """Ids in, ids out: the longest recorded sequence that is a prefix of `ids` is extended, else a new one opened.

        `origin` says who wrote the tokens that follow the last turn. A completion that a limit cut off is returned as
        it is; its `finish_reason` says so. For loops that keep the tokens themselves.
        """
        self._check_free()
        if self._opened and not self.by_ids:
            raise PluginError("the agent loop uses one conversation by messages and by ids: fork it and use one each")
        self.by_ids = True
        if not self._opened:
            await self._open()
        while True:
            free = self._shared.limits.tokens_free()
            full, prompt, text = self.backend.take_ids(
                ids, len(self.turns), origin, None if free is None else free - 1, self.messages
            )
            if full is not StopReason.TOKEN_BUDGET or not self._shared.limits.tokens_are_held:
                break
            await self._wait()
        if full is not None:
            self._end(full)
        if prompt is not None:
            self.messages[:] = prompt
        elif text and self.turns:
            self.turns[-1].replies = [Message(Role.USER if origin is Origin.USER else Role.TOOL, text)]
            self.messages += self.turns[-1].replies
        reason = await self._write(max_tokens, stop)
        turn, completion = self.turns[-1], self.backend.completion
        self.messages.append(turn.message)
        self._shown, self._answer_end = False, len(self.messages)
        self.cut = (reason or StopReason.TURN_TRUNCATED) if turn.finish_reason is FinishReason.LENGTH else None
        return completion

    async def call_tools(self, message: Message) -> list[Message]:
        """The tools' answers to this message's calls, one for each."""
        turn = self._last_turn()
        if not message.tool_calls:
            return []
        start, before = time.perf_counter(), len(turn.calls)
        task = self._shared.enter()
        try:
            replies = await self._tools.call(message.tool_calls, turn.calls)
            if self._shared.limits.may_show(images_in(replies)):  # else `add` ends the episode, and nobody needs them
                await prepare_images_of(self.backend, replies)
        finally:
            self._shared.leave(task)
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
        if self._user is None:
            return []
        task = self._shared.enter()
        try:
            ended, text = await self._ask(self._user)
        finally:
            self._shared.leave(task)
        if ended:
            self._end(StopReason.USER_ENDED)
        if self._shared.limits.user_turns_are_used:
            self._end(StopReason.USER_TURN_BUDGET)
        self._shared.limits.count_user_turn()
        return [Message(Role.USER, text)]

    def add(self, replies: Sequence[Message]) -> None:
        """Show replies to the model. A reply nobody could answer is recorded but not shown."""
        turn = self._last_turn()
        if not self._awaits_reply:
            raise PluginError("the agent loop adds replies twice in a row: it must generate in between")
        if any(reply.role is Role.ASSISTANT for reply in replies):
            raise PluginError("the agent loop adds an assistant message; only the policy speaks as the assistant")
        turn.replies = [cleaned(reply) for reply in replies]
        if self._shared.limits.turns_are_used:
            self._end(StopReason.ASSISTANT_TURN_BUDGET)
        ready = self.backend.has_prepared(images := images_in(turn.replies)) or not self._shared.limits.may_show(images)
        full = self._show(turn.replies, len(self.messages)) if (can_show := ready and not is_large(replies)) else None
        if not can_show or (full is StopReason.TOKEN_BUDGET and self._shared.limits.tokens_are_held):
            self._held = turn.replies, len(self.messages)  # shown when images are prepared and the others are done
        elif full is not None:
            self._end(full)
        self.messages.extend(turn.replies)
        self._awaits_reply = False

    async def finish(self) -> None:
        """Show the user a last message that a budget or the loop kept from it, so that none goes unscored."""
        if self._user is not None and self._user.began and self.turns and not self._shown:
            await self._ask(self._user)

    def _offer(self, tools: Sequence[JsonSchema]) -> None:
        """Show these tools and run no others; those that are not the episode's are for the loop to answer."""
        self.backend.tools = list(tools)
        names = {schema["function"]["name"] for schema in tools}
        entries = {name: entry for name, entry in self._shared.tools.entries.items() if name in names}
        self._tools = dataclasses.replace(self._shared.tools, entries=entries)

    async def _open(self) -> None:
        """Show the prompt; while its images are prepared nobody else may."""
        if not self._shared.limits.may_show(images := images_in(self.messages)):
            self._end(StopReason.IMAGE_BUDGET)
        limits, self._writing = self._shared.limits, True
        limits.images += len(images)
        try:
            await prepare_images_of(self.backend, self.messages)
            if not self.by_ids and not await open_prompt(self.backend, self.messages):
                self._end(StopReason.CONTEXT_FULL)
            self._opened = True
        finally:
            self._writing = False
            limits.images -= 0 if self._opened else len(images)

    def _show(self, replies: Sequence[Message], before: int) -> StopReason | None:
        """Put replies to the model unless a limit, which is returned, forbids it; one token is left to answer them."""
        free = self._shared.limits.tokens_free()
        budget, images = None if free is None else free - 1, images_in(replies)
        if not self._shared.limits.may_show(images):
            return StopReason.IMAGE_BUDGET
        messages = self.messages if before == len(self.messages) else self.messages[:before]
        full = self.backend.append_replies(messages, replies, self.turns[-1].index, budget)
        self._shared.limits.images += len(images) if full is None else 0
        return full

    async def _show_held(self) -> None:
        while self._held is not None:
            if self._shared.limits.may_show(images_in(self._held[0])):
                await prepare_images_of(self.backend, self._held[0])
            full = await off_loop(self._held[0], self._show, *self._held)
            if full is StopReason.TOKEN_BUDGET and self._shared.limits.tokens_are_held:
                await self._shared.changed()
                self._check_going_on()
                continue
            self._held = None
            if full is not None:
                self._end(full)

    async def _write(self, max_tokens: int | None, stop: Sequence[str]) -> StopReason | None:
        """Have the next turn written and record it; returns what limits it, None for the caller's own limit."""
        shared, held = self._shared, 0
        shared.begin_turn()
        task, before = shared.enter(), len(self.turns)
        self._writing = True
        try:
            if self._held is not None:
                await self._show_held()
            own = shared.sampling.max_tokens if max_tokens is None else min(max_tokens, shared.sampling.max_tokens)
            room = self.backend.room()
            wanted = own if room is None else min(own, room)
            held = await shared.hold_tokens(wanted)
            limit, reason = turn_limit(
                own, shared.limits.tokens_left(), room, is_callers=own != shared.sampling.max_tokens
            )
            if limit <= 0:
                self._end(reason or StopReason.TURN_TRUNCATED)
            start = time.perf_counter()
            try:
                turn = await self.backend.reply(len(self.turns), limit, stop)
            except Exception as error:
                self.broken = error
                raise
            self.broken = None
            turn.generate_seconds = time.perf_counter() - start
            self.turns.append(turn)
            return reason
        finally:
            self._writing = False
            shared.release_tokens(held)
            if len(self.turns) == before:
                shared.limits.cancel_turn()
            shared.leave(task)

    async def _wait(self) -> None:
        """Until another conversation of the episode is done; the caller is on the list of those to be stopped."""
        task = self._shared.enter()
        self._writing = True
        try:
            await self._shared.changed()
        finally:
            self._writing = False
            self._shared.leave(task)
        self._check_going_on()

    def _check_going_on(self) -> None:
        self._shared.check_going_on()
        if self._ended is not None:
            raise BranchEnd(self._ended)

    def _check_free(self) -> None:
        self._check_going_on()
        if self._writing:
            raise PluginError("the agent loop generates twice at once in one conversation: fork it")

    def _last_turn(self) -> Turn:
        self._check_going_on()
        if not self.turns:
            raise PluginError("the agent loop must generate first: the assistant has not replied yet")
        return self.turns[-1]

    def _end(self, reason: StopReason) -> NoReturn:
        if self.name and reason in OF_THE_CONVERSATION:
            self._ended = reason
            raise BranchEnd(reason)
        self._shared.end(reason)

    async def _ask(self, user: EpisodeUser) -> tuple[bool, str]:
        self._shown = True  # before the answer: a user who hangs is not asked again
        start = time.perf_counter()
        # Replies that were added after it but never answered are not part of what the user is asked about.
        reply = await user.respond(self.messages[: self._answer_end], self.turns)
        self.turns[-1].user_score = reply.score
        self.turns[-1].reply_seconds += time.perf_counter() - start
        return reply.end, reply.text

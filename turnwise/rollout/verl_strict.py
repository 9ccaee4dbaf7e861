"""The conversation of `compat.strict`: turns, calls and users are treated as verl's tool agent loop treats them.

docs/coming-from-verl.md lists what differs otherwise and why, and what is not reproduced.
"""

import dataclasses

from turnwise.rollout.chat_backends import TokenBackend
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.interaction_sessions import InteractionSession
from turnwise.types import Message, Origin, StopReason

SOLUTION = "solution_str"
"""The artifact with the text of the whole response, which verl gives to reward functions."""


class StrictConversation(Conversation):
    """As verl: the last permitted turn calls no tool and is shown to no user, tool replies count as user turns, calls
    beyond the limit and unreadable ones are dropped, and the user's last words are appended."""

    _over = False

    async def call_tools(self, message: Message) -> list[Message]:
        self._last_turn()
        self._check_limits()
        calls = [call for call in message.tool_calls if call.problem is None][: self.rollout.max_parallel_calls]
        if not calls:  # as if none had been written
            return await self.ask_user()
        replies = await super().call_tools(dataclasses.replace(message, tool_calls=tuple(calls)))
        self._user_turns += 1
        return replies

    async def ask_user(self) -> list[Message]:
        self._last_turn()
        self._check_limits()
        replies = await super().ask_user()
        if self._over:
            self.add(replies)
            self._end(StopReason.USER_ENDED)
        return replies

    async def finish(self) -> None:
        """No user is asked any more; the text of all that followed the prompt is kept for reward functions."""
        if not self.turns or not isinstance(self.backend, TokenBackend):
            return
        ledger = self.backend.segments[self.turns[-1].segment]
        written = (ledger.origins != Origin.PROMPT).nonzero()[0]
        ids = ledger.token_ids[int(written[0]) :].tolist() if written.size else []
        self.artifacts[SOLUTION] = self.backend.renderer.tokenizer.hf.decode(ids, skip_special_tokens=True)

    async def _ask(self, interaction: InteractionSession) -> tuple[bool, str]:
        self._over, text = await super()._ask(interaction)
        return False, text

    def _check_limits(self) -> None:
        if self._shared.turns_are_used:
            self._end(StopReason.ASSISTANT_TURN_BUDGET)
        if self.rollout.max_user_turns and self._user_turns >= self.rollout.max_user_turns:
            self._end(StopReason.USER_TURN_BUDGET)

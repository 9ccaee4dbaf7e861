"""The conversation of `verl.strict`: turns, calls and users are treated as verl 0.6.1's tool agent loop treats them.

docs/ext/verl.md lists what differs otherwise and why, and what is not reproduced.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from turnwise.config.choices import Keep
from turnwise.rollout.chat_backends import TokenBackend
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.toolbox.replies import CHARACTERS_PER_TOKEN
from turnwise.rollout.toolbox.toolbox import EpisodeTools
from turnwise.rollout.users.episode_user import EpisodeUser
from turnwise.types import CallStatus, Message, Origin, StopReason, ToolCall, ToolResult

SOLUTION = "solution_str"
"""The artifact with the text of the whole response, which verl gives to reward functions."""


FAILED = "Error when executing tool: "


class StrictConversation(Conversation):
    """As verl: the last permitted turn calls no tool and is shown to no user, tool replies count as user turns, calls
    beyond the limit and unreadable ones are dropped, those inside thoughts are run, and the user's last words are
    appended."""

    _over = False

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Message:
        message = await super().generate(max_tokens=max_tokens, stop=stop)
        thought = self._thought_calls(message)
        if not thought:
            return message
        message = dataclasses.replace(message, tool_calls=(*thought, *message.tool_calls))
        self.turns[-1].message = self.messages[-1] = message
        return message

    def _thought_calls(self, message: Message) -> list[ToolCall]:
        """Calls that stand in a thought: verl's parsers do not know thoughts, but for that of gpt-oss."""
        if not message.reasoning or not isinstance(self.backend, TokenBackend):
            return []
        read = self.backend.renderer.call_format
        if read.THINK != "<think>":
            return []
        parsed = read.parse(message.reasoning, turn=self.turns[-1].index, in_reasoning=False, tools=self.tools)
        start = len(message.tool_calls)
        return [
            dataclasses.replace(call, id=f"t{self.turns[-1].index % 1000:03d}c{(start + n) % 10000:04d}")
            for n, call in enumerate(parsed.tool_calls)
        ]

    async def call_tools(self, message: Message) -> list[Message]:
        self._last_turn()
        self._check_limits()
        calls = [call for call in message.tool_calls if call.problem is None][: self.rollout.max_parallel_calls]
        if not calls:  # as if none had been written
            return await self.ask_user()
        if not isinstance(self._tools, StrictTools):
            self._tools = StrictTools.of(self._tools)
        replies = await super().call_tools(dataclasses.replace(message, tool_calls=tuple(calls)))
        self._shared.limits.count_user_turn()
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

    async def _ask(self, user: EpisodeUser) -> tuple[bool, str]:
        self._over, text = await super()._ask(user)
        return False, text

    def _check_limits(self) -> None:
        if self._shared.limits.turns_are_used:
            self._end(StopReason.ASSISTANT_TURN_BUDGET)
        if self.rollout.max_user_turns and self._shared.limits.user_turns_are_used:
            self._end(StopReason.USER_TURN_BUDGET)


class StrictTools(EpisodeTools):
    """As verl: arguments are not checked, errors have verl's words, and replies are cut by characters."""

    @classmethod
    def of(cls, tools: EpisodeTools) -> "StrictTools":
        """A copy of the episode's tools with the same sessions."""
        return cls(**{field.name: getattr(tools, field.name) for field in dataclasses.fields(tools)})

    async def _fit(self, text: str, limit: int, keep: Keep) -> tuple[str, bool]:
        most = limit * CHARACTERS_PER_TOKEN
        if len(text) <= most or text.startswith(FAILED):
            return text, False
        match keep:
            case Keep.head:
                return f"{text[:most]}...(truncated)", True
            case Keep.tail:
                return f"(truncated)...{text[-most:]}", True
            case Keep.both:
                return f"{text[: most // 2]}...(truncated)...{text[-(most // 2) :]}", True

    async def _check(self, entry: Any, call: ToolCall) -> None:
        """Nothing: the tool sees what the model wrote."""

    def _failed(
        self, status: CallStatus, problem: str, error: Exception | None = None
    ) -> tuple[CallStatus, ToolResult]:
        return status, ToolResult(f"{FAILED}{problem if error is None else error}")

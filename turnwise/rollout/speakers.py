"""How a conversation is put to a model: token by token through a Sampler, or as messages through a chat endpoint."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from turnwise.chat.renderer import HistoryRewritten, Renderer
from turnwise.config import SamplingConfig
from turnwise.engines.sampler import NoiseKey, Sampler, SamplingParams
from turnwise.types import (
    Completion,
    FinishReason,
    JsonSchema,
    Ledger,
    Message,
    Origin,
    RenderCheck,
    Role,
    ToolCall,
)

if TYPE_CHECKING:
    from turnwise.engines.endpoint import ChatEndpoint


@dataclass(frozen=True, slots=True)
class Spoken:
    """One assistant turn as it came."""

    message: Message
    finish_reason: FinishReason
    policy_version: int
    prompt_tokens: int
    completion_tokens: int
    segment: int
    start: int


class Speaker(Protocol):
    """The model's side of one conversation."""

    segments: list[Ledger]

    def open(self, prompt: Sequence[Message]) -> None:
        """Take the first prompt."""
        ...

    def used(self) -> int:
        """Tokens after the first prompt, as far as they are known."""
        ...

    def room(self) -> int | None:
        """Tokens left in the model's context; None when only the endpoint knows."""
        ...

    async def speak(self, turn: int, max_tokens: int) -> Spoken:
        """The next assistant turn."""
        ...

    def hear(self, messages: Sequence[Message], replies: Sequence[Message], turn: int, limit: int | None) -> bool:
        """Take replies to the last turn; False, and nothing taken, when they need more than `limit` tokens."""
        ...

    def check(self, messages: Sequence[Message]) -> RenderCheck | None:
        """The self-check of the finished conversation."""
        ...

    async def close(self) -> None:
        """Release what the engine keeps for this conversation."""
        ...


@dataclass(slots=True)
class TokenSpeaker:
    """Token in, token out: the ledger is what the sampler saw and wrote."""

    renderer: Renderer
    sampler: Sampler
    sampling: SamplingConfig
    tools: Sequence[JsonSchema]
    noise: NoiseKey
    conversation: str
    segments: list[Ledger] = field(default_factory=list)
    _prompt: list[Message] = field(default_factory=list)
    _prompt_tokens: int = 0
    _last: tuple[Message, Completion] | None = None

    def open(self, prompt: Sequence[Message]) -> None:
        self._prompt = list(prompt)
        self._open_segment(self.renderer.open(prompt, self.tools), turn=0)
        self._prompt_tokens = len(self.segments[0])

    def used(self) -> int:
        return sum(map(len, self.segments)) - self._prompt_tokens

    def room(self) -> int | None:
        return self.sampler.context_length - len(self.segments[-1])

    async def speak(self, turn: int, max_tokens: int) -> Spoken:
        ledger = self.segments[-1]
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            stop_strings=tuple(self.sampling.stop),
            stop_ids=self.renderer.stop_ids,
        )
        start = len(ledger)
        completion = await self.sampler.generate(self._name(), list(ledger.token_ids), params, self.noise)
        ledger.append(completion.token_ids, Origin.POLICY, turn, completion.logprobs)
        message = self.renderer.read(completion, turn)
        self._last = (message, completion)
        return Spoken(
            message,
            completion.finish_reason,
            completion.policy_version,
            start,
            len(completion.token_ids),
            len(self.segments) - 1,
            start,
        )

    def hear(self, messages: Sequence[Message], replies: Sequence[Message], turn: int, limit: int | None) -> bool:
        if self._last is None:
            raise ValueError("nobody has spoken yet")
        try:
            spans = self.renderer.extend(self._prompt, *self._last, replies, self.tools)
        except HistoryRewritten:
            ids = self.renderer.open([*messages, *replies], self.tools)
            if limit is not None and len(ids) - len(self.segments[-1]) > limit:
                return False
            self._open_segment(ids, turn)
            return True
        if limit is not None and sum(len(span.ids) for span in spans) > limit:
            return False
        for span in spans:
            self.segments[-1].append(span.ids, span.origin, turn)
        return True

    def check(self, messages: Sequence[Message]) -> RenderCheck | None:
        return self.renderer.check(self.segments[-1], messages, self.tools)

    async def close(self) -> None:
        for number in range(len(self.segments)):
            await self.sampler.release(f"{self.conversation}/{number}")

    def _open_segment(self, ids: list[int], turn: int) -> None:
        ledger = Ledger()
        ledger.append(ids, Origin.PROMPT, turn)
        self.segments.append(ledger)

    def _name(self) -> str:
        return f"{self.conversation}/{len(self.segments) - 1}"


@dataclass(slots=True)
class EndpointSpeaker:
    """Messages in, messages out. No token ids come back, so there is no ledger: for evaluation only."""

    endpoint: "ChatEndpoint"
    sampling: SamplingConfig
    tools: Sequence[JsonSchema]
    noise: NoiseKey
    call_format: ModuleType
    segments: list[Ledger] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)
    _used: int = 0

    def open(self, prompt: Sequence[Message]) -> None:
        self._messages = list(prompt)

    def used(self) -> int:
        return self._used

    def room(self) -> int | None:
        return None

    async def speak(self, turn: int, max_tokens: int) -> Spoken:
        reply = await self.endpoint.complete(
            [_as_openai(message) for message in self._messages],
            list(self.tools),
            max_tokens=max_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            stop=list(self.sampling.stop),
            seed=self.noise.bits() % 2**31,
        )
        message = self._read(reply.text, reply.tool_calls, turn)
        self._messages.append(message)
        self._used += reply.completion_tokens
        return Spoken(message, reply.finish_reason, 0, reply.prompt_tokens, reply.completion_tokens, 0, 0)

    def hear(self, messages: Sequence[Message], replies: Sequence[Message], turn: int, limit: int | None) -> bool:
        self._messages.extend(replies)
        return True

    def check(self, messages: Sequence[Message]) -> RenderCheck | None:
        return None

    async def close(self) -> None:
        return None

    def _read(self, text: str, calls: Sequence[tuple[str, str, str]], turn: int) -> Message:
        """The server's own tool calls, or those it left in the text."""
        message: Message = self.call_format.parse(text, turn=turn, in_reasoning=False)
        if not calls:
            return message
        parsed = tuple(_read_call(*call) for call in calls)
        return Message(Role.ASSISTANT, text, parsed, reasoning=message.reasoning, answer=message.answer)


def _read_call(call_id: str, name: str, arguments: str) -> ToolCall:
    try:
        value = json.loads(arguments or "{}")
    except json.JSONDecodeError as error:
        return ToolCall(call_id, name, {}, f'"arguments" is not valid JSON: {error}')
    if not isinstance(value, dict):
        return ToolCall(call_id, name, {}, '"arguments" must be an object')
    return ToolCall(call_id, name, value)


def _as_openai(message: Message) -> dict[str, object]:
    entry: dict[str, object] = {"role": message.role.value, "content": message.text}
    if message.tool_calls and "<tool_call>" not in message.text:  # else the text itself already spells the calls
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name or "unreadable", "arguments": json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role is Role.TOOL:
        entry["tool_call_id"] = message.tool_call_id
    return entry

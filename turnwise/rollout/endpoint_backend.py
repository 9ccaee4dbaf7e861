"""A conversation with a chat endpoint: messages in, messages out, and no tokens to learn from."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from turnwise.chat.calls.tool_format import ToolFormat
from turnwise.config import SamplingConfig
from turnwise.engines.samplers.request import NoiseKey
from turnwise.errors import DataError, EpisodeError, PluginError
from turnwise.rollout.openai_messages import as_openai, assistant_entry, shown_url
from turnwise.types import (
    Completion,
    Image,
    JsonSchema,
    Ledger,
    Message,
    Origin,
    RenderCheck,
    Role,
    StopReason,
    ToolCall,
    Turn,
)

if TYPE_CHECKING:
    from turnwise.engines.samplers.endpoint import EndpointReply

NO_IDS = "the agent loop generates from token ids, but an endpoint takes only text: use an engine with token ids"


class Endpoint(Protocol):
    """What an EndpointBackend needs of a ChatEndpoint."""

    async def complete(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop: list[str] | None = None,
        seed: int | None = None,
    ) -> "EndpointReply":
        """Asks the endpoint for one assistant message."""
        ...


@dataclass(slots=True)
class EndpointBackend:
    """Messages in, messages out. No token ids come back, so there is no ledger: for evaluation only."""

    endpoint: Endpoint
    sampling: SamplingConfig
    tools: Sequence[JsonSchema]
    noise: NoiseKey
    call_format: ToolFormat
    segments: list[Ledger] = field(default_factory=list)
    image_roles: frozenset[Role] = frozenset((Role.USER, Role.TOOL))
    lost: list[str] = field(default_factory=list)
    """Always empty: the endpoint's client tries again by itself."""
    max_pixels: int | None = None
    """Of an image, above which it is made smaller before it is sent."""
    _urls: dict[Image, str] = field(default_factory=dict)
    """The images as they are sent."""
    _entries: list[dict[str, Any]] = field(default_factory=list)
    _first_prompt: int = 0
    _used: int = 0

    async def prepare_images(self, images: Sequence[Image]) -> None:
        for image in images:
            if image not in self._urls:
                self._urls[image] = await asyncio.to_thread(shown_url, image, self.max_pixels)

    def has_prepared(self, images: Sequence[Image]) -> bool:
        return all(image in self._urls for image in images)

    def open(self, prompt: Sequence[Message]) -> None:
        self._entries = self._sent(prompt)

    def used(self) -> int:
        return self._used

    def room(self) -> int | None:
        return None

    @property
    def completion(self) -> Completion:
        raise PluginError(NO_IDS)

    def take_ids(
        self, ids: Sequence[int], turn: int, origin: Origin, budget: int | None, messages: Sequence[Message]
    ) -> tuple[StopReason | None, list[Message] | None, str]:
        raise PluginError(NO_IDS)

    async def reply(self, turn: int, max_tokens: int, stop: Sequence[str] = ()) -> Turn:
        reply = await self.endpoint.complete(
            list(self._entries),
            list(self.tools),
            max_tokens=max_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            stop=[*self.sampling.stop, *stop],
            seed=(self.noise.bits() + turn) % 2**31,  # another each turn: a server starts its noise anew
        )
        message = self._read(reply, turn)
        # Calls that were read from the text are spelled by it.
        self._entries.append(assistant_entry(reply.text, message.tool_calls if reply.tool_calls else ()))
        if not turn:
            self._first_prompt = reply.prompt_tokens
        # What tools and users said is known from the next prompt; a server that counts nothing reports 0.
        self._used = max(self._used, reply.prompt_tokens - self._first_prompt) + reply.completion_tokens
        return Turn(turn, message, reply.finish_reason, 0, reply.prompt_tokens, reply.completion_tokens)

    def append_replies(
        self, messages: Sequence[Message], replies: Sequence[Message], turn: int, budget: int | None
    ) -> StopReason | None:
        self._entries += self._sent(replies)
        return None

    def check(self, messages: Sequence[Message]) -> RenderCheck | None:
        return None

    async def close(self) -> None:
        return None

    def _sent(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        try:
            return as_openai(messages, self.call_format, self._urls)
        except DataError as error:  # an image where an endpoint takes none
            raise EpisodeError(str(error)) from error

    def _read(self, reply: "EndpointReply", turn: int) -> Message:
        """The server's own tool calls and reasoning, or those it left in the text."""
        message = self.call_format.parse(reply.text, turn=turn, in_reasoning=False, tools=self.tools)
        calls = tuple(_read_call(*call) for call in reply.tool_calls)
        reasoning = message.reasoning if reply.reasoning is None else reply.reasoning
        return Message(
            Role.ASSISTANT, reply.text, calls or message.tool_calls, reasoning=reasoning, answer=message.answer
        )


def _read_call(call_id: str, name: str, arguments: str) -> ToolCall:
    try:
        value = json.loads(arguments or "{}")
    except json.JSONDecodeError as error:
        return ToolCall(call_id, name, {}, f'"arguments" is not valid JSON: {error}')
    if not isinstance(value, dict):
        return ToolCall(call_id, name, {}, '"arguments" must be an object')
    return ToolCall(call_id, name, value)

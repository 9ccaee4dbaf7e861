"""A policy that answers single calls: nothing is kept between them but what the sampler's cache shares."""

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from turnwise.chat.images.blocks import images_in
from turnwise.chat.renderer import Renderer
from turnwise.config import Config, SamplingConfig
from turnwise.engines.rendering import demand_readable_calls
from turnwise.engines.samplers.request import NoiseKey
from turnwise.engines.samplers.sampler import Sampler
from turnwise.errors import DataError, TemplateError, one_line
from turnwise.ext.sdk_agents.calls import FULL, Call, ClientReply, Refused
from turnwise.ext.sdk_agents.replies import check_heads, check_tools, reply_to, strict_checkers
from turnwise.rollout.chat_backends import TokenBackend, open_prompt
from turnwise.types import Image, Role


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """One policy by the name that clients call it: `ServedPolicy("first", config, renderer, sampler)`."""

    name: str
    config: Config
    renderer: Renderer
    sampler: Sampler
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def reply(self, call: Call, seed: int | None) -> ClientReply:
        """The next message after those of the call; the same call with the same seed draws the same."""
        if call.model != self.name:
            raise Refused(
                f"there is no model {call.model!r} here, only {self.name!r}", status=404, code="model_not_found"
            )
        check_tools(call)
        checkers = await asyncio.to_thread(strict_checkers, call) if call.strict else {}
        sampling = self._sampling(call)
        noise = NoiseKey(secrets.randbits(63) if seed is None else seed, 0, "", 0)
        conversation = f"call {next(self._numbers)}"
        backend = TokenBackend(self.renderer, self.sampler, sampling, call.tools, noise, conversation)
        try:
            room = await self._open(backend, call)
            # Numbered within the client's conversation, so that its calls have names of their own.
            number = sum(message.role is Role.ASSISTANT for message in call.messages)
            turn = await backend.reply(number, min(sampling.max_tokens, room), call.stop)
        finally:
            await backend.close()
        return await reply_to(call, turn, backend, (*sampling.stop, *call.stop), checkers)

    def _sampling(self, call: Call) -> SamplingConfig:
        """As the call says, and else as the run was sampled."""
        own = self.config.sampling
        return replace(
            own,
            temperature=own.temperature if call.temperature is None else call.temperature,
            top_p=own.top_p if call.top_p is None else call.top_p,
            max_tokens=own.max_tokens if call.max_tokens is None else call.max_tokens,
        )

    async def _open(self, backend: TokenBackend, call: Call) -> int:
        """Put the call's messages to the model; how many tokens are left for the answer."""
        try:
            if call.tools:
                demand_readable_calls(self.config, self.renderer.tokenizer)
            await self._prepare_images(backend, images_in(call.messages))
            room = backend.room() if await open_prompt(backend, call.messages) else 0
        except TemplateError as error:
            raise Refused(f"messages: {one_line(error)}", code="invalid_message") from error
        if not room or room < 1:
            text = f"the messages leave no room for an answer in the model's {self.sampler.context_length} tokens"
            raise Refused(text, code=FULL)
        return room

    async def _prepare_images(self, backend: TokenBackend, images: Sequence[Image]) -> None:
        if not images:
            return
        if not backend.image_roles:
            raise Refused("messages: this model reads text only, and there is an image", code="no_images")
        if any(not image.source.startswith("data:") for image in images):
            raise Refused(
                "messages: an image is a data URL here; nothing is fetched for a client", code="invalid_image"
            )
        try:
            await asyncio.to_thread(check_heads, images, by_us=True)
            await backend.prepare_images(images)
        except DataError as error:
            raise Refused(f"messages: {one_line(error)}", code="invalid_image") from error


def no_model(asked: str, name: str) -> Refused:
    """The answer to who wants another model than the one that is served."""
    return Refused(f"there is no model {asked[:80]!r} here, only {name!r}", status=404, code="model_not_found")

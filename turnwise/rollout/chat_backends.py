"""How a conversation is put to a model: token by token through a Sampler, or as messages through a chat endpoint."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from turnwise.chat.control_tokens import with_texts
from turnwise.chat.images.blocks import Prompt, images_in, place_images
from turnwise.config import SamplingConfig
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Sampler
from turnwise.errors import DataError, EngineLost, EpisodeError, PluginError
from turnwise.ledger import Media
from turnwise.rollout.large_messages import exceed, off_loop
from turnwise.rollout.toolbox.toolbox import clean
from turnwise.system.image_sources import read_image
from turnwise.system.retrying import AttemptFailed, RetryPolicy, retrying
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
    Turn,
)

if TYPE_CHECKING:
    from turnwise.chat.renderer import Renderer

LOST_RETRY = RetryPolicy(retries=3, first_wait=0.5)
"""How often a turn is asked again whose engine was lost, where nobody says."""


class ChatBackend(Protocol):
    """The model's side of one conversation."""

    segments: list[Ledger]
    lost: list[str]
    """What was lost with an engine that went away, try by try: `turn 2: node 3 left`."""
    tools: Sequence[JsonSchema]
    """Those that the model is shown; set before `open`."""
    noise: NoiseKey
    """What the next turn is drawn with."""

    @property
    def image_roles(self) -> frozenset[Role]:
        """The roles whose images the model is given; none when it reads text only."""
        ...

    async def prepare_images(self, images: Sequence[Image]) -> None:
        """Prepare images before messages show them; DataError for one that the model cannot take."""
        ...

    def has_prepared(self, images: Sequence[Image]) -> bool:
        """Whether all of them are prepared."""
        ...

    def open(self, prompt: Sequence[Message]) -> None:
        """Take the first prompt, whose images are prepared."""
        ...

    def used(self) -> int:
        """Tokens after the first prompt, as far as they are known."""
        ...

    def room(self) -> int | None:
        """Tokens left in the model's context; None when only the endpoint knows."""
        ...

    async def reply(self, turn: int, max_tokens: int, stop: Sequence[str] = ()) -> Turn:
        """Have the assistant write turn number `turn`; `stop` beside the run's own stop strings."""
        ...

    @property
    def completion(self) -> Completion:
        """The completion of the last turn: its tokens and log-probs."""
        ...

    def take_ids(
        self, ids: Sequence[int], turn: int, origin: Origin, budget: int | None, messages: Sequence[Message]
    ) -> tuple[StopReason | None, list[Message] | None, str]:
        """Go on from these tokens: (the limit that forbids it, a first prompt other than `messages`, the new text)."""
        ...

    def append_replies(
        self, messages: Sequence[Message], replies: Sequence[Message], turn: int, budget: int | None
    ) -> StopReason | None:
        """Take replies to the last turn; `messages` are those before them, the last turn's at the end.

        When they need more than `budget` tokens, leave the assistant no room in the context, or cannot be shown after
        what it wrote, nothing is taken and the reason is returned.
        """
        ...

    def check(self, messages: Sequence[Message]) -> RenderCheck | None:
        """The self-check of the finished conversation."""
        ...

    async def close(self) -> None:
        """Release what the engine keeps for this conversation."""
        ...


def cleaned(message: Message) -> Message:
    """A message whose text every tokenizer can take: a loop's own words are not cleaned yet."""
    content = with_texts(message, clean)
    return message if content == message.content else replace(message, content=content)


async def prepare_images_of(backend: ChatBackend, messages: Sequence[Message]) -> None:
    """Have the images of messages prepared, off the event loop."""
    if images := images_in(messages):
        try:
            await backend.prepare_images(images)
        except DataError as error:
            raise EpisodeError(str(error)) from error


async def open_prompt(backend: ChatBackend, prompt: Sequence[Message]) -> bool:
    """Have a backend take the first prompt; False for one that no context of its model holds, however it is encoded."""
    if isinstance(backend, TokenBackend) and backend.exceeds(prompt):
        return False
    await off_loop(prompt, backend.open, prompt)
    return True


@dataclass(slots=True)
class TokenBackend:
    """Token in, token out: the ledger is what the sampler saw and wrote.

    Each segment is a conversation of its own to the sampler, named `<conversation>/<segment>`.
    """

    renderer: "Renderer"
    sampler: Sampler
    sampling: SamplingConfig
    tools: Sequence[JsonSchema]
    noise: NoiseKey
    conversation: str
    retry: RetryPolicy = LOST_RETRY
    segments: list[Ledger] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _used: int = 0
    _last: tuple[Message, Completion] | None = None
    _replied: tuple[int, int] = (0, 0)
    """Segment and length of its ledger after the last turn."""
    _drawn: SamplingParams | None = None
    _at: int = -1
    """The segment that is written on."""
    _media: dict[Image, Media] = field(default_factory=dict)
    """What the model's processor made of the images."""

    @property
    def image_roles(self) -> frozenset[Role]:
        return self.renderer.image_roles if self.sampler.capabilities.media else frozenset()

    async def prepare_images(self, images: Sequence[Image]) -> None:
        for image in images:
            if image not in self._media:
                self._media[image] = await asyncio.to_thread(self._prepare, image)

    def has_prepared(self, images: Sequence[Image]) -> bool:
        return all(image in self._media for image in images)

    def _prepare(self, image: Image) -> Media:
        processor = self.renderer.images
        if processor is None or not self.image_roles:
            raise DataError("a message shows an image, and the model reads text only")
        return processor.prepare(read_image(image.source))

    def open(self, prompt: Sequence[Message]) -> None:
        self._open_segment(self.renderer.prompt(prompt, self.tools, self._media), turn=0)

    def exceeds(self, messages: Sequence[Message]) -> bool:
        """Whether no context of the model holds these, however they are encoded."""
        return exceed(messages, self.renderer.tokenizer, self.sampler.context_length)

    def used(self) -> int:
        return self._used

    def room(self) -> int | None:
        return self.sampler.context_length - len(self.segments[self._at])

    @property
    def completion(self) -> Completion:
        if self._last is None:
            raise ValueError("the assistant has not replied yet")
        return self._last[1]

    async def reply(self, turn: int, max_tokens: int, stop: Sequence[str] = ()) -> Turn:
        ledger = self.segments[self._at]
        start = len(ledger)
        params = self._params(max_tokens)
        if stop:
            params = replace(params, stop_strings=(*params.stop_strings, *stop))
        request = Request(self._name(), ledger.token_ids, params, self._noise(), ledger.media)
        completion = await self._generate(request, turn)
        ledger.append(completion.token_ids, Origin.POLICY, turn, completion.logprobs, completion.versions)
        message = self.renderer.read(completion, turn, request.token_ids, self.tools)
        self._last = (message, completion)
        self._replied = (self._at, len(ledger))
        self._used += len(completion.token_ids)
        return Turn(
            turn,
            message,
            completion.finish_reason,
            completion.policy_version,
            prompt_tokens=start,
            completion_tokens=len(completion.token_ids),
            segment=self._at,
            start=start,
            experts=completion.experts,
        )

    def append_replies(
        self, messages: Sequence[Message], replies: Sequence[Message], turn: int, budget: int | None
    ) -> StopReason | None:
        from turnwise.chat.template.history import HistoryRewritten, WordsRefused

        if self._last is None:
            raise ValueError("the assistant has not replied yet")
        if self.exceeds(replies):
            return StopReason.CONTEXT_FULL
        try:
            spans = self.renderer.extend(messages[:-1], *self._last, replies, self.tools, self._media)
        except HistoryRewritten:
            return self._reopen(messages, replies, turn, budget)
        except WordsRefused:  # it reads like any other end of an episode: what was written before it is scored
            return StopReason.TEMPLATE_REFUSED
        added = sum([len(span.ids) for span in spans])
        ledger = self.segments[self._at]
        full = self._full(added, len(ledger) + added, budget)
        if full is None:
            ledger.append_given(spans, turn)
            place_images(ledger, [self._media[image] for image in images_in(replies)])
            self._used += added
        return full

    def take_ids(
        self, ids: Sequence[int], turn: int, origin: Origin, budget: int | None, messages: Sequence[Message]
    ) -> tuple[StopReason | None, list[Message] | None, str]:
        sequence = np.asarray(ids, np.int64)
        if not sequence.size or sequence.ndim != 1:
            raise PluginError("the agent loop generates from no token ids: there is nothing to continue")
        alike = [ledger.shared_length(sequence) for ledger in self.segments]
        recorded = [at for at, length in enumerate(alike) if length == len(self.segments[at])]
        at = max(recorded, key=alike.__getitem__, default=None)
        # Of a context made anew, the rewritten history is no news: what follows the words it shares is.
        added = sequence[alike[self._at if at is None else at] :] if alike else sequence[:0]
        full = self._full(len(added), len(sequence), budget)
        if full is not None:
            return full, None, ""
        prompt, decode = None, self.renderer.tokenizer.decode
        opened = Prompt(sequence.tolist())
        if not self.segments:
            rendered = self.renderer.prompt(messages, self.tools, self._media) if messages else Prompt([])
            if rendered.ids == opened.ids:
                opened = rendered
            elif rendered.media:
                raise PluginError("the agent loop generates from ids that are not the prompt's, which shows images")
            else:
                prompt = [Message(Role.USER, decode(opened.ids))]
        if at is not None:
            self._at = at
            self.segments[at].append(added, origin, max(turn - 1, 0))
        elif any(ledger.media for ledger in self.segments):
            raise PluginError("the agent loop generates from other ids than before, and images were shown among those")
        else:
            self._open_segment(opened, max(turn - 1, 0))
        self._used += len(added)
        return None, prompt, decode(added.tolist())

    def _reopen(
        self, messages: Sequence[Message], replies: Sequence[Message], turn: int, budget: int | None
    ) -> StopReason | None:
        """A new segment that starts from the rewritten history; only the words of the replies are new in it."""
        prompt = self.renderer.prompt([*messages, *replies], self.tools, self._media)
        added = sum(len(self.renderer.tokenizer.encode(reply.text).ids) for reply in replies)
        added += sum(len(self._media[image].token_ids) for image in images_in(replies))
        full = self._full(added, len(prompt.ids), budget)
        if full is None:
            self._open_segment(prompt, turn)
            self._used += added
        return full

    def _full(self, added: int, length: int, budget: int | None) -> StopReason | None:
        """Which limit replies break; the tighter one when they break both."""
        over = length + 1 - self.sampler.context_length  # one for the assistant
        if budget is not None and added - budget >= max(over, 1):
            return StopReason.TOKEN_BUDGET
        return StopReason.CONTEXT_FULL if over > 0 else None

    def check(self, messages: Sequence[Message]) -> RenderCheck | None:
        """Every segment against the messages up to its last turn; the first that differs, else the last.

        What was added after the last turn and never answered is left out on both sides.
        """
        spoken = [at for at, message in enumerate(messages) if message.role is Role.ASSISTANT]
        answered = [at for at in spoken if messages[at].answer is not None]  # the others stand in the prompt
        checks: list[RenderCheck] = []
        for number, ledger in enumerate(self.segments):
            segment, length = self._replied
            recorded = ledger.prefix(length) if number == segment else ledger
            turns = recorded.turns[recorded.loss_mask]
            if len(turns):
                until = answered[int(turns[-1])] + 1
                checks.append(self.renderer.check(recorded, messages[:until], self.tools, self._media))
        worst = [check for check in checks if check.problem is not None]
        worst += [check for check in checks if not check.exact]
        return next(iter([*worst, *checks[-1:]]), None)

    async def close(self) -> None:
        for number in range(len(self.segments)):
            with contextlib.suppress(EngineLost):  # what it kept went with it
                await self.sampler.release(f"{self.conversation}/{number}")

    async def _generate(self, request: Request, turn: int) -> Completion:
        """Ask for a turn, and again when its engine was lost: the same tokens so far, the same noise."""

        async def attempt() -> Completion:
            try:
                return await self.sampler.generate(request)
            except EngineLost as error:
                self.lost.append(f"turn {turn}: {error}")
                failed = AttemptFailed(str(error))
                failed.at_once = error.elsewhere
                raise failed from error

        try:
            return await retrying(attempt, self.retry)
        except AttemptFailed as error:
            raise EpisodeError(f"the engine was lost in turn {turn}, {error.attempts} tries: {error}") from error

    def _params(self, max_tokens: int) -> SamplingParams:
        """How to draw a turn, the same as for the last one unless its limit is another."""
        if self._drawn is None or self._drawn.max_tokens != max_tokens:
            self._drawn = SamplingParams(
                max_tokens=max_tokens,
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                top_k=self.sampling.top_k,
                stop_strings=(*self.sampling.stop, *self.renderer.stop_strings),
                stop_ids=self.renderer.stop_ids,
            )
        return self._drawn

    def _open_segment(self, prompt: Prompt, turn: int) -> None:
        ledger = Ledger()
        ledger.append(prompt.ids, Origin.PROMPT, turn)
        ledger.place_at(prompt.media)
        self.segments.append(ledger)
        self._at = len(self.segments) - 1

    def _noise(self) -> NoiseKey:
        """Noise belongs to a position; a new segment counts positions anew and must not draw the same again."""
        return self.noise if not self._at else replace(self.noise, seed=self.noise.seed + (self._at << 40))

    def _name(self) -> str:
        return f"{self.conversation}/{self._at}"

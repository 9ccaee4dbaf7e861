"""A sampler over an engine that streams tokens: our stops, a version for every token, and turns that go on after an
update of the weights."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence, Set
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.samplers.in_flight import DecodeText, QueuedRequest, RunningRequest, Writers
from turnwise.engines.samplers.plugin import ROUNDING
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams, refuse_media
from turnwise.engines.samplers.sampler import Capabilities
from turnwise.engines.weight_updates import Update
from turnwise.errors import EngineError, EngineLost
from turnwise.ext.servers.images import SentImages, with_markers
from turnwise.ledger import Media, MediaSpan
from turnwise.system import time_budget
from turnwise.types import Completion, FinishReason

STRIDE = 0x9E3779B97F4A7C15
MOST_SEED = 2**63 - 1


class StreamPiece(NamedTuple):
    """What came next of a turn, and how it ended if it did."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish: FinishReason | None
    versions: Sequence[tuple[int, int]] = ()
    """Of an engine that tells them: which version wrote from which token of this answer on, in order."""


class StreamRequest(NamedTuple):
    """What an engine is asked for: so many tokens after these."""

    token_ids: NDArray[np.int64]
    params: SamplingParams
    limit: int
    seed: int
    """A whole number below 2**63: a function of the turn's noise and of how much of it is written."""
    conversation: str
    media: tuple[MediaSpan, ...] = ()
    new: Set[str] = frozenset()
    """Which of the images are sent with it, by digest; the others are named, and the engine has them."""


class StreamedSampler(ABC):
    """Implements the Sampler protocol; a subclass says how to stream, to load weights and to sleep.

    An engine that can holds its turns over an update and tells which version wrote which of their tokens (`_holds`).
    Any other is cut off: what has come of a turn is kept, under the version that wrote it, and what the engine wrote
    beyond that is dropped. When the update is done the turn goes on from its tokens, with the new weights and nothing
    cached of the old ones. So no token can be of another version than it is recorded with.
    """

    version: int = 0
    """Which weights write."""
    problem: str = ""
    """Why it was not healthy, where more is known than silence."""
    sequences: int | None = None
    """How many it decodes together, of one that was asked."""
    midway: bool = True
    """Whether updates may come in the middle of turns: if not, an engine is asked for a whole turn in one answer."""
    keeps: bool = False
    """Whether turns that it holds over an update go on with the keys and values of the old weights."""

    def __init__(
        self, name: str, *, context_length: int, vocabulary: int, decode: DecodeText, capabilities: Capabilities
    ) -> None:
        self.name, self.context_length, self.capabilities = name, context_length, capabilities
        self._vocabulary, self._decode = vocabulary, decode
        self._reading: set[asyncio.Task[FinishReason]] = set()
        self._changing = asyncio.Lock()
        """Held by who changes weights or memory."""
        self._open = asyncio.Event()
        self._open.set()
        self._asleep = self._down = False
        """Whether nobody is to write, and whether the engine has given its memory back."""
        self._failed: EngineError | None = None
        """Why nobody can write: weights that are half new, a server that is gone, the end."""
        self._marker: int | None = None
        """The token that it puts an image for, where it can be shown any."""
        self._sent = SentImages()

    # --- what an engine does ----------------------------------------------------------------------------------------

    @abstractmethod
    async def start(self) -> None:
        """Bring it up; then `context_length` is known."""

    @abstractmethod
    async def restart(self) -> None:
        """Bring it back, with whatever weights it starts from."""

    @abstractmethod
    async def healthy(self) -> bool:
        """Whether it would serve a request now."""

    @abstractmethod
    def _stream(self, draw: StreamRequest) -> AsyncGenerator[StreamPiece, None]:
        """Write tokens until a stop id, the engine's own notice of a stop string, or the limit; closing it aborts."""

    @abstractmethod
    async def _load(self, update: Update, version: int) -> None:
        """Take these weights, and forget what was computed with others; no turn is under way but those it holds."""

    @property
    def _holds(self) -> bool:
        """Whether it holds turns over an update by itself, and its pieces tell their versions."""
        return False

    @abstractmethod
    async def _lie_down(self) -> None:
        """Give memory back, where the engine can."""

    @abstractmethod
    async def _get_up(self) -> None:
        """Takes back the memory that sleep freed; does nothing unless an engine overrides it."""

    @abstractmethod
    async def _end(self) -> None:
        """Frees everything the engine holds; does nothing unless an engine overrides it."""

    async def _vouch(self) -> None:  # noqa: B027 - an engine of ours has the weights that we gave it
        """EngineLost when what answers has other weights than it was given last: what it wrote has no version."""

    # --- the protocol -----------------------------------------------------------------------------------------------

    async def try_image(self, marker: int, image: Media) -> str | None:
        """Show it one: from now on it takes images, or the answer is why it does not."""
        self._marker, self.capabilities = marker, replace(self.capabilities, media=True)
        params, key = SamplingParams(max_tokens=1, temperature=0.0), NoiseKey(0, 0, "a first look", 0)
        try:
            await self.generate(Request("a first look", image.token_ids, params, key, (MediaSpan(image, 0),)))
        except EngineError as error:
            self.capabilities = replace(self.capabilities, media=False)
            if not await self.healthy():
                raise
            return str(error)
        return None

    async def generate(self, request: Request) -> Completion:
        """Continue a sequence; see the Sampler protocol."""
        if not self.capabilities.media:
            refuse_media(request, self.name)
        limit = min(request.params.max_tokens, self.context_length - len(request.token_ids))
        queued = QueuedRequest(
            request.conversation, request.token_ids, request.params, request.noise.bits(), request.media
        )
        turn = RunningRequest(queued, limit, 0, shareable=False, writers=Writers(self.version))
        while len(turn.ids) < limit:
            await self._until_open()
            reading = asyncio.ensure_future(self._read(turn))
            self._reading.add(reading)
            try:
                await asyncio.wait({reading})
            except asyncio.CancelledError:
                reading.cancel()
                await asyncio.wait({reading})
                raise
            finally:
                self._reading.discard(reading)
            if not reading.cancelled():
                return turn.completion(await self._vouched(reading))
        return turn.completion(FinishReason.LENGTH)

    async def _vouched(self, reading: "asyncio.Task[FinishReason]") -> FinishReason:
        """How a turn ended that an engine with the right weights wrote; another one may refuse it too."""
        error = reading.exception()
        if not isinstance(error, EngineLost) and (error is not None or not self._holds):
            await self._vouch()
        return reading.result()

    async def release(self, conversation: str) -> None:  # noqa: B027 - nothing to do is what it does
        """Nothing is kept by name: the engine's cache finds prefixes by their tokens."""

    async def publish(self, update: Update, version: int) -> None:
        """Take the weights; turns under way go on with them."""
        if type(update) not in self.capabilities.updates:
            accepted = " and ".join(sorted(kind.__name__ for kind in self.capabilities.updates)) or "no weights"
            raise EngineError(f"the {self.name} takes {accepted}, not {type(update).__name__}")
        async with self._changing:
            self._open.clear()
            try:
                if not self._holds:
                    await self._cut()
                await self._vouch()  # for what turns under way have written with the weights before these
                await self._take_memory()
                await self._load(update, version)
            except BaseException as error:  # half of the weights may be new: nobody writes with them
                self._failed = _ending(f"publishing version {version} failed: {error}", error)
                await self._cut()
                self._open.set()
                raise
            self.version, self._failed = version, None
            self._go_on()

    async def sleep(self) -> None:
        """Lend memory; turns under way wait."""
        async with self._changing:
            await self._cut()
            self._asleep = True
            if not self._down:
                await self._lie_down()
                self._down = True

    async def wake(self) -> None:
        """Takes the engine's memory back and lets turns go on."""
        async with self._changing:
            await self._take_memory()
            self._asleep = False
            self._go_on()

    async def close(self) -> None:
        """Free everything; pending requests fail."""
        self._failed = EngineError(f"the {self.name} is closed")
        await self._cut()
        self._open.set()
        await self._end()

    async def _lose(self, problem: str) -> None:
        """Everything under way is lost; nobody writes until the engine is back."""
        self._failed = EngineLost(problem)
        await self._cut()
        self._open.set()

    def _is_back(self) -> None:
        """With the weights it starts from, awake."""
        self._failed, self._asleep, self._down, self.version = None, False, False, 0

    # --- one turn ---------------------------------------------------------------------------------------------------

    async def _until_open(self) -> None:
        while not self._open.is_set():  # looked at again: whoever opened may have closed before we woke
            with time_budget.waiting():
                await self._open.wait()
        if self._failed is not None:
            raise type(self._failed)(str(self._failed)) from self._failed

    async def _cut(self) -> None:
        self._open.clear()
        reading = list(self._reading)
        for task in reading:
            task.cancel()
        if reading:
            await asyncio.wait(reading)

    async def _take_memory(self) -> None:
        """Weights have to be somewhere, also those of an engine that sleeps on."""
        if self._down:
            await self._get_up()
            self._down = False

    def _go_on(self) -> None:
        if not self._asleep:
            self._open.set()

    async def _read(self, turn: RunningRequest) -> FinishReason:
        """Write on until the turn ends; what came is in `turn`, however this ends."""
        turn.written_by(self.version)
        written = len(turn.ids)
        seed = (turn.request.noise_bits + (turn.prompt_length + written) * STRIDE) & MOST_SEED
        request = turn.request
        draw = StreamRequest(
            turn.sequence(), request.params, turn.limit - written, seed, request.conversation, request.media
        )
        ended: FinishReason | None = None
        try:
            async with aclosing(self._shown(draw) if draw.media else self._stream(draw)) as pieces:
                async for piece in pieces:  # to the end of its answer, so that its connection serves again
                    if ended is not None:
                        continue
                    self._check(piece, turn.limit - len(turn.ids))
                    ended = self._take(turn, piece)
                    for version, start in piece.versions:
                        if written + start < len(turn.ids):
                            turn.writers.hand_over(version, written + start)
                    if ended is not None and piece.finish is None:
                        return ended  # it would write on
        except asyncio.CancelledError:
            if ended is None:  # else the turn is written, and only the end of its answer is missing
                raise
        if ended is None:
            raise EngineLost(f"{self.name} ended its answer without saying why")
        return ended

    def _take(self, turn: RunningRequest, piece: StreamPiece) -> FinishReason | None:
        """Add what came to the turn; how it ended, if it did."""
        for token, logprob in zip(piece.ids, piece.logprobs, strict=True):
            turn.ids.append(token)
            turn.logprobs.append(logprob)
            if turn.stops(token, self._decode):
                return FinishReason.STOP
        return FinishReason.LENGTH if piece.finish is None and len(turn.ids) == turn.limit else piece.finish

    async def _shown(self, draw: StreamRequest) -> AsyncGenerator[StreamPiece, None]:
        """A turn with images. One that the engine was sent is named then, and sent again if it has it no more."""
        everything = {span.media.digest for span in draw.media}
        for new in (self._sent.new(draw.media), everything):
            begun = False
            try:
                async with aclosing(self._stream(draw._replace(new=new))) as pieces:
                    async for piece in pieces:
                        if not begun:
                            self._sent.add(draw.media)
                        begun = True
                        yield piece
                return
            except EngineError as error:
                if begun or new == everything or isinstance(error, EngineLost):
                    raise
                self._sent.forget()

    def _marked(self, draw: StreamRequest) -> list[int]:
        """Its tokens as the engine is sent them."""
        if not draw.media or self._marker is None:
            tokens: list[int] = draw.token_ids.tolist()
            return tokens
        return with_markers(draw.token_ids, draw.media, self._marker)

    def _check(self, piece: StreamPiece, room: int) -> None:
        """Of what an engine answers nothing unchecked is recorded."""
        ids, logprobs = piece.ids, piece.logprobs
        problem = ""
        if len(ids) != len(logprobs):
            problem = f"{len(ids)} tokens with {len(logprobs)} log-probs"
        elif len(ids) > room:
            problem = f"{len(ids)} tokens where {room} were left to write"
        elif not all(type(token) is int and 0 <= token < self._vocabulary for token in ids):
            problem = f"token ids outside a vocabulary of {self._vocabulary}"
        elif not all(isinstance(logprob, float | int) and -math.inf < logprob <= ROUNDING for logprob in logprobs):
            problem = "log-probs that are missing, nan, infinite or above 0"
        if problem:
            raise EngineError(f"{self.name} answered with {problem}")


def _ending(problem: str, cause: BaseException) -> EngineError:
    error = EngineLost(problem) if isinstance(cause, EngineLost) else EngineError(problem)
    error.__cause__ = cause
    return error

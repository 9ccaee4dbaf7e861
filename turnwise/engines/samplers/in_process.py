"""A sampler in this process: an asyncio front over one worker thread that owns all model work."""

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.samplers.in_flight import Outcome, QueuedRequest, SamplerStats
from turnwise.engines.samplers.request import Request, SamplingParams, refuse_media
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import FullWeights, Update
from turnwise.errors import EngineError
from turnwise.ledger import check_places
from turnwise.system import time_budget
from turnwise.types import Completion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Submit:
    request: QueuedRequest
    future: "asyncio.Future[Completion]"


@dataclass(frozen=True, slots=True)
class _Cancel:
    request: QueuedRequest


@dataclass(frozen=True, slots=True)
class _Release:
    conversation: str


@dataclass(frozen=True, slots=True)
class _Publish:
    update: FullWeights
    version: int
    future: "asyncio.Future[None]"


@dataclass(frozen=True, slots=True)
class _Sleep:
    asleep: bool
    future: "asyncio.Future[None]"


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Order = _Submit | _Cancel | _Release | _Publish | _Sleep | _Close


class Batching(Protocol):
    """Continuous batching as the worker drives it: synchronous, and owned by one thread but for `waited` and counters.

    A batcher may have work under way on a device between two calls; `settle` waits for it, and comes before whatever
    changes weights or memory.
    """

    stats: SamplerStats
    policy_version: int
    asleep: bool

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        ...

    @property
    def bytes(self) -> int:
        """Memory held for keys and values."""
        ...

    @property
    def cached_bytes(self) -> int:
        """The part of it that is kept for conversations between turns."""
        ...

    def submit(self, request: QueuedRequest) -> Completion | EngineError | None:
        """Queue a request; one that needs no work or cannot be served is answered at once."""
        ...

    def cancel(self, request: QueuedRequest) -> None:
        """Drop a request wherever it is."""
        ...

    def release(self, conversation: str) -> None:
        """Forget a conversation; one still writing is forgotten when it ends."""
        ...

    def settle(self) -> list[Outcome]:
        """Wait for what is under way on a device; what ended."""
        ...

    def refuse(self, update: FullWeights) -> EngineError | None:
        """What is wrong with weights that are not this model's; nothing has changed then."""
        ...

    def publish(self, update: FullWeights, version: int) -> None:
        """Write with other weights from the next step on."""
        ...

    def sleep(self) -> None:
        """Hold no keys and values until `wake`."""
        ...

    def wake(self) -> None:
        """Go on from where everybody stood."""
        ...

    def waited(self, request: QueuedRequest) -> float:
        """Seconds a request has waited for its row or stood still; any thread may ask."""
        ...

    def step(self) -> list[Outcome]:
        """Compute a little further; what ended."""
        ...

    def close(self) -> None:
        """Give all memory back; whoever still waits is told by others."""
        ...


class InProcessSampler:
    """Implements the Sampler protocol on a batcher, in this process.

    Callers put orders into an inbox; the worker drains it between steps, sleeps on it when idle, and wakes callers
    through their own event loop. `stats` and `cached_bytes` may be read at any time.
    """

    def __init__(
        self,
        batcher: Batching,
        model: PolicyModel,
        *,
        name: str,
        on_worker: Callable[[], AbstractContextManager[None]],
        policy_version: int,
    ) -> None:
        """`name` stands in what is refused; `on_worker` is entered by the worker for its whole life."""
        self.capabilities = Capabilities(
            Logprobs.SCALED, frozenset({FullWeights}), media=model.reads_images, sleeps=True
        )
        self.context_length = model.shape.context_length
        self._vocab_size = model.shape.vocab_size
        self._name = name
        self._on_worker = on_worker
        self._batcher = batcher
        self._batcher.policy_version = policy_version
        self._inbox: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held to put a request into the inbox and to declare the end, so that none slips in after it."""
        self._ended: tuple[str, BaseException | None] | None = None
        self._pending: dict[QueuedRequest, asyncio.Future[Completion]] = {}
        self._written_before = -1
        """Tokens in all when turns last lost what was computed for them."""
        self._worker = threading.Thread(target=self._run, name="turnwise-sampler", daemon=True)
        self._worker.start()

    @property
    def stats(self) -> SamplerStats:
        """The sampler's counters since it was opened."""
        return self._batcher.stats

    @property
    def cached_bytes(self) -> int:
        """Memory held for conversations between turns."""
        return self._batcher.cached_bytes

    @property
    def policy_version(self) -> int:
        """The version of the weights that the sampler writes with."""
        return self._batcher.policy_version

    async def generate(self, request: Request) -> Completion:
        """Continue a sequence; see the Sampler protocol."""
        if request.media:
            _check_media(request, self._name if not self.capabilities.media else None)
        ids, params = self._checked_ids(request.token_ids), _checked_params(request.params)
        queued = QueuedRequest(request.conversation, ids, params, request.noise.bits(), request.media)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._put(_Submit(queued, future))
        try:
            with time_budget.reported_wait(lambda: self._batcher.waited(queued)):
                return await future
        except asyncio.CancelledError:
            self._inbox.put(_Cancel(queued))
            raise

    async def release(self, conversation: str) -> None:
        """Forget a conversation's cache."""
        self._inbox.put(_Release(conversation))

    async def publish(self, update: Update, version: int) -> None:
        """Replace the weights between two steps; returns when all that is written from then on is theirs.

        The tensors are copied and must not change before that. A turn being written goes on with the new weights;
        its completion says which tokens are whose.
        """
        if not isinstance(update, FullWeights):
            raise EngineError(f"the {self._name} takes full weights, not {type(update).__name__}")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_Publish(update, version, future))
        await future

    async def sleep(self) -> None:
        """Write nothing until `wake` and hold no keys and values. Requests wait, new weights are taken."""
        await self._set_asleep(asleep=True)

    async def wake(self) -> None:
        """Go on writing; what was under way is computed anew, and its tokens are what they would have been."""
        await self._set_asleep(asleep=False)

    async def _set_asleep(self, *, asleep: bool) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_Sleep(asleep, future))
        await future

    async def close(self) -> None:
        """Fail what is pending and end the worker."""
        self._inbox.put(_Close())
        await asyncio.to_thread(self._worker.join)

    def _put(self, order: _Submit | _Publish | _Sleep) -> None:
        with self._lock:
            if self._ended is not None:
                raise _ending(*self._ended)
            self._inbox.put(order)

    def _checked_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """A copy: the caller's sequence grows on."""
        if not len(ids):
            raise EngineError("cannot continue an empty prompt")
        ids = np.array(ids, dtype=np.int64)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise EngineError(f"token id {wrong} is outside the vocabulary of {self._vocab_size}")
        return ids

    def _run(self) -> None:
        """The worker's life. Whatever ends it, everybody who waits or comes later hears why."""
        ended: tuple[str, BaseException | None] = ("the sampler is closed", None)
        try:
            with self._on_worker(), torch.inference_mode():
                self._serve()
                self._batcher.close()
        except BaseException as error:  # not swallowed: every pending and future request raises from it
            ended = (f"the sampler's worker failed: {error!r}", error)
        with self._lock:
            self._ended = ended
        while not self._inbox.empty():
            order = self._inbox.get()
            if isinstance(order, _Submit):
                self._pending[order.request] = order.future
            elif isinstance(order, _Publish | _Sleep):
                _wake(order.future.get_loop(), [(order.future, _ending(*ended))])
        self._deliver([(request, _ending(*ended)) for request in self._pending])

    def _serve(self) -> None:
        while True:
            while self._batcher.asleep or self._batcher.idle or not self._inbox.empty():
                order = self._inbox.get()
                if isinstance(order, _Close):
                    return
                while isinstance(order, _Publish | _Sleep) and self._owed:
                    self._deliver(self._batcher.step())
                self._obey(order)
                if isinstance(order, _Publish | _Sleep):
                    self._written_before = self._batcher.stats.decoded_tokens
            self._deliver(self._batcher.step())

    @property
    def _owed(self) -> bool:
        """Whether turns wait and nobody wrote a token since new weights or sleep took their caches. They come first:
        else orders that come faster than prompts are computed anew would keep every turn from its next token."""
        written = self._batcher.stats.decoded_tokens
        return written == self._written_before and not (self._batcher.asleep or self._batcher.idle)

    def _obey(self, order: _Submit | _Cancel | _Release | _Publish | _Sleep) -> None:
        match order:
            case _Submit(request, future):
                self._pending[request] = future
                answer = self._batcher.submit(request)
                if answer is not None:
                    self._deliver([(request, answer)])
            case _Cancel(request):
                self._pending.pop(request, None)
                self._batcher.cancel(request)
            case _Release(conversation):
                self._batcher.release(conversation)
            case _Publish(update, version, published):
                result = self._batcher.refuse(update)  # the caller's mistake, nothing has changed
                if result is None:
                    self._deliver(self._batcher.settle())
                    try:
                        self._batcher.publish(update, version)
                    except BaseException as error:  # half of the weights may be new: nobody writes with them
                        failed = _ending(f"publishing version {version} failed: {error!r}", error)
                        _wake(published.get_loop(), [(published, failed)])
                        raise
                _wake(published.get_loop(), [(published, result)])
            case _Sleep(asleep, done):
                if asleep:
                    self._deliver(self._batcher.settle())
                    self._batcher.sleep()
                else:
                    self._batcher.wake()
                _wake(done.get_loop(), [(done, None)])

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """Hand results to the callers' event loops, one wake-up per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion | EngineError]]]
        by_loop = defaultdict(list)
        for request, result in outcomes:
            future = self._pending.pop(request)
            by_loop[future.get_loop()].append((future, result))
        for loop, results in by_loop.items():
            _wake(loop, results)


def _wake(loop: asyncio.AbstractEventLoop, results: Sequence[tuple["asyncio.Future[T]", T | EngineError]]) -> None:
    try:
        loop.call_soon_threadsafe(_settle, results)
    except RuntimeError:
        if not loop.is_closed():
            raise  # a closed loop has nobody left who waits


def _settle(results: Sequence[tuple["asyncio.Future[T]", T | EngineError]]) -> None:
    for future, result in results:
        if future.done():  # cancelled meanwhile
            continue
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)


def _ending(text: str, cause: BaseException | None) -> EngineError:
    error = EngineError(text)
    error.__cause__ = cause
    return error


def _check_media(request: Request, text_only: str | None) -> None:
    if text_only is not None:
        refuse_media(request, text_only)
    try:
        check_places(request.media, request.token_ids)
    except ValueError as error:
        raise EngineError(f"{request.conversation!r} cannot be continued: {error}") from error


def _checked_params(params: SamplingParams) -> SamplingParams:
    if params.max_tokens < 0 or params.top_k < 0:
        raise EngineError(f"max_tokens and top_k cannot be negative, found {params.max_tokens} and {params.top_k}")
    if not params.temperature >= 0.0:
        raise EngineError(f"temperature must be 0 or more, found {params.temperature}")
    if not 0.0 < params.top_p <= 1.0:
        raise EngineError(f"top_p must be above 0 and at most 1, found {params.top_p}")
    if "" in params.stop_strings:
        raise EngineError("an empty stop string would end every turn at once")
    return params
